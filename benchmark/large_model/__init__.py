"""Measures a model that is larger than its memory limit; `benchmark/memory.py weights` runs it."""
