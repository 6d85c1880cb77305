"""`sgl-batch jobs`: a client of the Files and Batches API, of our server or of another one."""
