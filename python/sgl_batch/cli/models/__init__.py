"""`sgl-batch models` and `sgl-batch check`: how models run, all families or one model. Nothing is loaded."""
