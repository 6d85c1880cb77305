-- What validation estimates of the job's lines, in tokens; 0 for jobs that an earlier program validated.
ALTER TABLE jobs ADD COLUMN estimated_prompt_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN estimated_output_tokens INTEGER NOT NULL DEFAULT 0;  -- all lines at their limits
ALTER TABLE jobs ADD COLUMN longest_output INTEGER NOT NULL DEFAULT 0;           -- the largest limit of one line
