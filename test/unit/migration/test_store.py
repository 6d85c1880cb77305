"""Tensors that do not match their header are found before a byte of them is sent."""

from __future__ import annotations

import torch
from page_store import PageStore

from sgl_batch.migration.store import layout_fault


def test_tensors_that_match_their_header_have_no_fault():
    store = PageStore(4)
    store.put("a", 3)
    export = store.export("a")
    assert layout_fault(export.header, export.tensors) is None


def test_a_wrong_number_shape_or_type_of_tensors_is_named():
    store = PageStore(4)
    store.put("a", 2)
    export = store.export("a")
    tensors = list(export.tensors)
    assert layout_fault(export.header, tensors[:-1]) == "11 tensors where its header says 12"
    other_shape = [*tensors[:5], tensors[5][:1], *tensors[6:]]
    assert "tensor 5 is bfloat16 (1, 8, 4) where its header says bfloat16 (2, 8, 4)" in (
        layout_fault(export.header, other_shape) or ""
    )
    other_type = [*tensors[:5], tensors[5].to(torch.float16), *tensors[6:]]
    assert "tensor 5 is float16 (2, 8, 4)" in (layout_fault(export.header, other_type) or "")
