"""`sgl-batch doctor`: what an engine finds on this machine, what is missing, and how to fix it."""
