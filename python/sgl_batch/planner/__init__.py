"""Makes a plan from a profile: cost model, layer graph, schedule, search. Pure: no torch, no files, no clock."""
