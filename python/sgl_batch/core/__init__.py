"""Decisions only: pure functions and state over plain values, shared by the scheduler and the simulator."""
