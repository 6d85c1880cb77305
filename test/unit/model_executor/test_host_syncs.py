"""Operations that would make the host wait for a GPU are counted on a CPU, and no others are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from host_syncs import HostSyncs

DEVICE = "cpu"  # as an engine's variable has it

WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "int": lambda x: int(x[0]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "to the host": lambda x: x.to("cpu"),
    "nonzero": lambda x: x.nonzero(),
    "by a mask": lambda x: x[x > 1],
    "write by a mask": lambda x: x.index_put_((x > 1,), torch.ones(2, device=DEVICE)),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: torch.repeat_interleave(x, x.long()),
    "numbers to the device": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=DEVICE),
    "a host tensor to the device": lambda x: torch.arange(3).to(DEVICE),
    "indices of the host": lambda x: x[torch.tensor([2, 0])],
    "a list of indices": lambda x: x[[2, 0]],
    "write of a host tensor": lambda x: x.copy_(torch.zeros(3)),
}
PASSES: dict[str, Callable[[torch.Tensor], object]] = {
    "computing": lambda x: (x + 1).softmax(-1).cumsum(-1).argmax(),
    "copies in the background": lambda x: (
        x.to("cpu", non_blocking=True),
        torch.arange(3).to(DEVICE, non_blocking=True),
    ),
    "made on the device": lambda x: torch.arange(3, device=DEVICE) + torch.zeros(3, device=DEVICE),
    "by indices of the device": lambda x: x[torch.arange(2, device=DEVICE)],
    "known sizes": lambda x: torch.repeat_interleave(x, x.long(), output_size=6),
    "looking at the host's own": lambda x: (torch.tensor([1, 2]).tolist(), int(torch.tensor([3, 4]).sum())),
    "what was brought to the host": lambda x: x.to("cpu", non_blocking=True).tolist(),
    "where": lambda x: torch.where(x > 1, x, 0.0),
}


@pytest.mark.parametrize("name", WAITS)
def test_it_is_counted(name: str) -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    with HostSyncs() as syncs:
        WAITS[name](values)
    assert syncs.take().total() == 1
    assert syncs.take().total() == 0


@pytest.mark.parametrize("name", PASSES)
def test_it_is_not_counted(name: str) -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    with HostSyncs() as syncs:
        PASSES[name](values)
    assert not syncs.take()
