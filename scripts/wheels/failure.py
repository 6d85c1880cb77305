"""Owns the error that ends `scripts/wheelhouse` with a message for its user."""


class WheelhouseError(Exception):
    """An error with its value and its remedy."""
