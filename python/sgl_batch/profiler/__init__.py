"""Measures a model on this machine, one layer of each kind, for the planner; knows the engine, decides no plan."""
