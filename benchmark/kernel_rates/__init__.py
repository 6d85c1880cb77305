"""Measures the CPU kernels for benchmark/cpu_kernels.py: work, the machine's ceilings, and the figures of both."""
