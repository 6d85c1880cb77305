"""Puts predictions of AIConfigurator beside those of the simulator's cost model, pass by pass and batch by batch."""
