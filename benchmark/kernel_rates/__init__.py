"""What benchmark/cpu_kernels.py measures: pieces of work, the ceilings of the machine, and the figures made of both."""
