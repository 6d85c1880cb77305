"""What a run counts, and its time by part."""
