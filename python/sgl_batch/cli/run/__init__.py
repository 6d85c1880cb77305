"""`sgl-batch run`: one input file through one engine."""
