"""Owns the comparing side of the benchmark: workload, rounds, figures, report; runs no engine itself."""
