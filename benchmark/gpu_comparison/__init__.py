"""Compares sgl_batch with stock SGLang on one GPU: shapes, regimes, visits and report of `benchmark/gpu.py`."""
