"""One GPU, sgl_batch beside stock SGLang: shapes, regimes, visits and report of `benchmark/gpu.py`."""
