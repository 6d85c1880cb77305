"""`sgl-batch models` and `sgl-batch check`: what runs how, of all models and of one, without loading any."""
