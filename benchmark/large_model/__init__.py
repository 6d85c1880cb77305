"""The measurement of a model that is larger than the memory it may take; `benchmark/memory.py weights` runs it."""
