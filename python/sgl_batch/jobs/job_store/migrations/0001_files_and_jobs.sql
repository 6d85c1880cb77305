-- `seq` is the order of creation. Cursors of listings use it, and rows of results name their job by it.
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    num_bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL CHECK (purpose IN ('batch', 'batch_output')),
    expires_at INTEGER
);
CREATE INDEX files_by_expiry ON files (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    status TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    metadata TEXT,                          -- JSON
    seed INTEGER NOT NULL,                  -- for lines without a seed of their own
    output_expires_after INTEGER,           -- seconds from the creation of the output
    continue_from TEXT REFERENCES jobs (id),
    taken_over INTEGER NOT NULL,            -- whether all answers of `continue_from` are copied
    output_file_id TEXT NOT NULL UNIQUE,    -- known from the start; `has_output` says whether the file was made
    error_file_id TEXT NOT NULL UNIQUE,
    has_output INTEGER NOT NULL DEFAULT 0,
    has_errors INTEGER NOT NULL DEFAULT 0,
    model TEXT,
    total INTEGER NOT NULL DEFAULT 0,       -- lines, once they are validated
    line_offsets BLOB,                      -- where every 1000th line begins
    errors TEXT,                            -- JSON: why validation failed
    completed INTEGER NOT NULL DEFAULT 0,   -- these seven always agree with the committed results
    failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    reasoning_tokens INTEGER NOT NULL DEFAULT 0,
    segment_bytes INTEGER NOT NULL DEFAULT 0,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    is_tidy INTEGER NOT NULL DEFAULT 0      -- ended, and nothing is left of its segment and results
);
CREATE INDEX jobs_untidy ON jobs (is_tidy) WHERE is_tidy = 0;
CREATE INDEX jobs_by_input ON jobs (input_file_id);

-- One row for each finished line, until the job has ended. The key makes a line count once.
CREATE TABLE results (
    job INTEGER NOT NULL REFERENCES jobs (seq),
    line_index INTEGER NOT NULL,
    place INTEGER NOT NULL,                 -- offset of the result line in the segment
    num_bytes INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    PRIMARY KEY (job, line_index)
) WITHOUT ROWID;

-- Lines that were in flight when an engine died. Those of one group (`lot`) run together, with no other lines.
CREATE TABLE suspects (
    job INTEGER NOT NULL REFERENCES jobs (seq),
    line_index INTEGER NOT NULL,
    lot INTEGER NOT NULL,
    PRIMARY KEY (job, line_index)
) WITHOUT ROWID;

CREATE TABLE idempotency_keys (
    key TEXT PRIMARY KEY,
    body_digest BLOB NOT NULL,
    job TEXT NOT NULL REFERENCES jobs (id)
) WITHOUT ROWID;
