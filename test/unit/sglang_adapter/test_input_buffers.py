"""SGLang's large buffers of zeros are made by who is named; the small ones, and those with other values, by SGLang."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_batch.mem_cache.device_page_pool import lazy_zeros
from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.input_buffers import large_input_buffers_made_by

with bootstrap.importing():
    from sglang.srt.model_executor.cuda_graph_buffer_registry import (
        CudaGraphBufferRegistry,
        GraphSlot,
        PaddingPolicy,
        build_eager_registry,
    )

TOKENS, REQUESTS = 1 << 20, 512


def registry() -> Any:
    return build_eager_registry(
        device=torch.device("cpu"), max_bs=REQUESTS, max_num_token=TOKENS, cache_loc_dtype=torch.int64
    )


def test_a_registry_has_the_buffers_that_sglang_would_make():
    made = []

    def make_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made.append((shape, dtype))
        return lazy_zeros(shape, dtype)

    stock = registry()
    with large_input_buffers_made_by(make_zeros):
        ours = registry()
    assert made == [((TOKENS,), torch.int64)] * 3 + [((3, TOKENS), torch.int64)]
    assert ours.slot_names() == stock.slot_names()
    for name in ours.slot_names():
        found, expected = ours.get_slot(name).buffer, stock.get_slot(name).buffer
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_buffers_of_other_values_are_left_to_sglang():
    own = CudaGraphBufferRegistry(device=torch.device("cpu"), max_bs=REQUESTS, max_num_tokens=TOKENS)
    slot = GraphSlot(
        "ones",
        lambda _, tokens: (tokens,),
        torch.int64,
        axis="tokens",
        padding_policy=PaddingPolicy.FILL_ONCE,
        pad_value=1,
    )
    with large_input_buffers_made_by(lazy_zeros):
        own.register_slot(slot)
    assert torch.equal(slot.buffer, torch.ones(TOKENS, dtype=torch.int64))


def test_sglang_makes_them_again_afterwards():
    register = CudaGraphBufferRegistry.register_slot
    with pytest.raises(KeyError), large_input_buffers_made_by(lazy_zeros):
        raise KeyError
    assert CudaGraphBufferRegistry.register_slot is register
