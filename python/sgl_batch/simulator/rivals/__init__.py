"""Owns policies of other engines, each behind the scheduler's interface. Costs of their kernels are not theirs."""
