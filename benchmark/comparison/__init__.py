"""Owns the comparison of engines: workload, rounds, figures, report. It runs no engine in its own process."""
