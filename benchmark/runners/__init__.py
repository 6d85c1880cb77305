"""Owns the measured side of the benchmark: one engine, in one fresh process, for one round."""
