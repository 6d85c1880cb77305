"""OpenAI files and batches as a service without HTTP: lifecycle, validation, running, committing and finishing jobs."""
