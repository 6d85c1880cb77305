"""Jobs: request lines, their validation, and the files of a job. It knows nothing of SGLang."""
