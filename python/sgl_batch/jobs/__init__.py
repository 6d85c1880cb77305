"""Jobs: request lines, their validation, and the files of a job. Knows nothing of SGLang."""
