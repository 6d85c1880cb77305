"""`sgl-batch doctor`: what this machine has for an engine, what is missing, and what to do about it."""
