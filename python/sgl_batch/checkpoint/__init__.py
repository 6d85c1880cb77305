"""A model directory as its files describe it, read without torch."""
