"""Owns who makes SGLang's buffers for the inputs of forward passes.

SGLang makes them for as many tokens as the KV pool has, 48 bytes for each, and fills them with zeros at the start. A
small model's pool on a CPU has millions of tokens, of which a pass takes thousands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    import torch
    from sglang.srt.model_executor.cuda_graph_buffer_registry import CudaGraphBufferRegistry

__all__ = ["large_input_buffers_made_by"]

_LARGE_BYTES = 2 << 20

MakeZeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@contextmanager
def large_input_buffers_made_by(make_zeros: MakeZeros) -> Iterator[None]:
    """Make buffers of zeros of 2 MiB or more with `make_zeros(shape, dtype)` inside. GPU graphs do not share these."""
    register = CudaGraphBufferRegistry.register_slot

    def register_slot(self: Any, slot: Any, bind: torch.Tensor | None = None) -> Any:
        if bind is None and slot.enabled and not slot.pad_value:
            shape = tuple(slot.shape_fn(self.max_bs, self.max_num_tokens))
            if math.prod(shape) * slot.dtype.itemsize >= _LARGE_BYTES:
                bind = make_zeros(shape, slot.dtype)
        return register(self, slot, bind)

    CudaGraphBufferRegistry.register_slot = register_slot
    try:
        yield
    finally:
        CudaGraphBufferRegistry.register_slot = register
