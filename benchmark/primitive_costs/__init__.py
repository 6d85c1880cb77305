"""What each coroutine primitive costs, measured on the classes that carry it out; `benchmark/primitives.py` runs it."""
