"""Owns the making of a directory of wheels for a machine without a network."""
