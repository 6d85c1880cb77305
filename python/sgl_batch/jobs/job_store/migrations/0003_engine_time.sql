-- The job's part of the engine's time up to its last commit, and what the engine answered in it. Lines that were refused
-- or copied from an earlier job took none. 0 for what an earlier program ran.
ALTER TABLE jobs ADD COLUMN engine_s REAL NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN engine_lines INTEGER NOT NULL DEFAULT 0;  -- these three agree with the committed results
ALTER TABLE jobs ADD COLUMN engine_input_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN engine_output_tokens INTEGER NOT NULL DEFAULT 0;
