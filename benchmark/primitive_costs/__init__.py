"""Measures the cost of each coroutine primitive with the classes that carry it out, for `benchmark/primitives.py`."""
