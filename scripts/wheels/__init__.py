"""Owns how a directory of wheels for a machine without a network is made; does not decide what such a machine runs."""
