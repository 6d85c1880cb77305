"""Owns the names under which our parts are registered with SGLang."""

CPU_PLATFORM = "sgl_batch_cpu"
STOCK_CPU_PLATFORM = "sgl_batch_stock_cpu"
CPU_ATTENTION = "sgl_batch_cpu"
TRITON_ATTENTION = "triton"
CPU_DISPATCH_KEY = "sgl_batch_cpu"
CPU_GRAMMAR = "sgl_batch_xgrammar"
# The load_format of weights that are sent as the bytes of safetensors files.
SAFETENSORS = "safetensors"
# The code of the error with which the engine ends a request that its user did not abort (refusals.py).
ENGINE_ABORT = "engine_abort"
