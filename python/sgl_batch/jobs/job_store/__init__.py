"""The jobs directory: a SQLite database, the users' files and the segments of running jobs."""
