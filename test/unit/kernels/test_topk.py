"""Arguments of the choice of experts that do not fit are refused with what they are."""

from __future__ import annotations

import pytest
import sgl_batch_kernel
import torch


def given(**changes):
    arguments = {"logits_TE": torch.zeros(2, 8), "top_k": 3, "renormalize": True, "groups": 4, "kept_groups": 2}
    return {**arguments, **changes}


def test_arguments_that_fit_are_taken():
    weights, ids = sgl_batch_kernel.topk(**given(bias_E=torch.zeros(8, dtype=torch.bfloat16)))
    assert weights.tolist() == torch.full((2, 3), 1 / 3).tolist()
    assert ids.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits_TE": torch.zeros(8, 2).T}, r"logits are \[2, 8\] with strides \[1, 2\]"),
        ({"logits_TE": torch.zeros(2, 8, dtype=torch.float16)}, "logits is Half; use bfloat16 or float32"),
        ({"logits_TE": torch.zeros(2, 0)}, r"logits are \[2, 0\]"),
        ({"groups": 3}, "8 experts do not make 3 equal groups"),
        ({"kept_groups": 5}, "a row keeps 5 of 4 groups"),
        ({"top_k": 5}, "a row chooses 5 of 4 experts in 2 groups"),
        ({"top_k": 0}, "a row chooses 0 of 4"),
        ({"bias_E": torch.zeros(7)}, r"bias is \[7\] for 8 experts"),
        ({"bias_E": torch.zeros(8), "groups": 8, "kept_groups": 4}, "groups of one expert have no two best"),
    ],
    ids=["strides", "number type", "no experts", "groups", "kept", "too many", "none", "bias", "two best"],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(RuntimeError, match=message):
        sgl_batch_kernel.topk(**given(**changes))
