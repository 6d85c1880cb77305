"""`sgl-batch plan`: the choice of a plan from a profile, printed with its reasons."""
