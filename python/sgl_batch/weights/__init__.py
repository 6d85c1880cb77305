"""Weights of experts that do not all stay in memory, and the proof that a checkpoint was loaded whole."""
