"""Measures the last sequences of a batch on several ranks, for `ranks.py long-tail`: cases, runs, bars, report."""
