"""Checks and choices before an engine serves: arguments, the model, and options that self-checks settle."""
