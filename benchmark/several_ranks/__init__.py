"""Measures ranks for ranks.py: workloads, the variant of a checkpoint, single runs, and their counters."""
