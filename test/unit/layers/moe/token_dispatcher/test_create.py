"""A dispatcher is made by name, or refused with what it needs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe.token_dispatcher import NAMES, create_token_dispatcher
from sgl_batch.layers.moe.token_dispatcher.base import Received, TokenDispatcher

SIZES = {"num_experts": 8, "hidden_size": 16}


def test_local_needs_no_group_and_takes_a_group_of_one(lone_group: dist.ProcessGroup) -> None:
    for group in (None, lone_group):
        dispatcher = create_token_dispatcher("local", group, **SIZES)
        assert (dispatcher.shard, dispatcher.num_shards, dispatcher.num_local_experts) == (0, 1, 8)


def test_gloo_takes_a_gloo_group(lone_group: dist.ProcessGroup) -> None:
    dispatcher = create_token_dispatcher("gloo", lone_group, **SIZES)
    assert (dispatcher.shard, dispatcher.num_shards, dispatcher.num_experts) == (0, 1, 8)
    assert dispatcher.exact_order


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=f"'mpi' is unknown; known: {', '.join(NAMES)}"):
        create_token_dispatcher("mpi", None, **SIZES)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "local"])
def test_all_but_local_need_a_group(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} needs a process group; choose local"):
        create_token_dispatcher(name, None, **SIZES)


def test_nccl_without_a_gpu_is_refused(lone_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="nccl needs a GPU, and torch sees none; choose gloo"):
        create_token_dispatcher("nccl", lone_group, **SIZES)


def test_a_group_of_another_backend_is_refused(lone_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ConfigError, match="needs a process group with the backend nccl for tensors on cuda; this one"):
        create_token_dispatcher("nccl", lone_group, **SIZES)


@pytest.mark.parametrize(("num_experts", "num_shards"), [(9, 2), (2, 4), (0, 1)])
def test_experts_that_cannot_be_shared_out_evenly_are_refused(num_experts: int, num_shards: int) -> None:
    class Other(TokenDispatcher):
        def _send_tokens(self, *args: torch.Tensor) -> Received:
            raise NotImplementedError

        def _return_partials(self, partial_RM: torch.Tensor, received: Received) -> torch.Tensor:
            raise NotImplementedError

    with pytest.raises(ConfigError, match=f"{num_experts} experts cannot be shared out evenly among {num_shards}"):
        Other(shard=0, num_shards=num_shards, num_experts=num_experts, hidden_size=16)
