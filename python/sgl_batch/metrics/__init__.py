"""What a run counts, and how its time divides among the parts of a pass."""
