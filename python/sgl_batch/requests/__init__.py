"""Checks of what requests may ask for, and the tags that they take to the scheduler."""
