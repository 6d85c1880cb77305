"""Owns the error that ends `scripts/wheelhouse` with a message for its user."""


class WheelhouseError(Exception):
    """What is wrong, with which value, and what to do about it."""
