"""Measures stock SGLang with sequences of unequal lengths, and simulates the same."""
