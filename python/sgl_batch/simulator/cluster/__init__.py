"""What a forward pass costs, and what fits, on a cluster that is not here: models, hardware, engines, regimes."""
