"""The server in front of the engine: HTTP, jobs, and the engine's process under supervision. It imports no torch."""
