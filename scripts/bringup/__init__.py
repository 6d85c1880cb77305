"""Brings a GPU machine up in stages; run it through scripts/gpu_bringup."""
