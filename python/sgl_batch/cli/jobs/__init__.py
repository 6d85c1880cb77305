"""`sgl-batch jobs`: a client of the Files and Batches API, ours or others'; decides nothing of what a job is."""
