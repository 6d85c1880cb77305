"""Arguments of latent attention that do not fit are refused with what they are."""

from __future__ import annotations

import pytest
import sgl_batch_kernel
import torch


def given(**changes):
    arguments = {
        "q_TD": torch.zeros(2, 3 * 8),
        "pages": torch.zeros(4, 2, 8),
        "starts": torch.tensor([0, 2]),
        "lengths": torch.tensor([3]),
        "table_starts": torch.tensor([0]),
        "tables": torch.tensor([1, 3]),
        "value_dim": 6,
        "scaling": 1.0,
    }
    return {**arguments, **changes}


def test_arguments_that_fit_are_taken():
    assert sgl_batch_kernel.latent_attention(**given()).shape == (2, 3 * 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_TD": torch.zeros(2, 20)}, r"q is \[2, 20\] with strides \[20, 1\] for rows of 8"),
        ({"value_dim": 9}, "values are 9 of a row's 8 numbers"),
        ({"tables": torch.tensor([1, 4])}, "page 4 of 4"),
        ({"tables": torch.tensor([1])}, "piece 0 has 2 pages from 0 on, but the tables end at 1"),
        ({"lengths": torch.tensor([1])}, "piece 0 is rows 0 to 2 of 2 and 1 tokens"),
        ({"pages": torch.zeros(4, 2, 8, dtype=torch.bfloat16)}, "q is Float and pages are BFloat16"),
    ],
    ids=["heads", "values", "page", "table", "tokens", "number type"],
)
def test_arguments_that_do_not_fit_are_refused_with_their_sizes(changes, message):
    with pytest.raises(RuntimeError, match=message):
        sgl_batch_kernel.latent_attention(**given(**changes))
