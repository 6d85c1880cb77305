"""DeepEP's dispatcher says what it needs, and calls DeepEP as documented. DeepEP itself needs two GPUs."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe.token_dispatcher.deepep import DeepEPDispatcher

SIZES = {"num_experts": 4, "hidden_size": 16}


class DocumentedBuffer:
    """deep_ep.Buffer of one rank, with the names and types that DeepEP documents."""

    latest_bytes: ClassVar[tuple[int, int]]

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        DocumentedBuffer.latest_bytes = (num_nvl_bytes, num_rdma_bytes)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> SimpleNamespace:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda hidden_bytes, ranks: 100 * hidden_bytes * ranks,
            get_rdma_buffer_size_hint=lambda hidden_bytes, ranks: 0,
        )

    @staticmethod
    def get_combine_config(num_ranks: int) -> SimpleNamespace:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda hidden_bytes, ranks: 10 * hidden_bytes * ranks,
            get_rdma_buffer_size_hint=lambda hidden_bytes, ranks: 7,
        )

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        in_rank_TW = (topk_idx >= 0).any(1, keepdim=True)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).to(torch.int32)
        return in_rank_TW.sum(0, dtype=torch.int32), None, per_expert, in_rank_TW, SimpleNamespace()

    def dispatch(
        self,
        x: torch.Tensor,
        *,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens_per_rank: torch.Tensor,
        num_tokens_per_rdma_rank: None,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
    ) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert topk_weights.is_contiguous()
        sent_T = is_token_in_rank[:, 0]
        assert int(num_tokens_per_rank) == int(sent_T.sum())
        counts = num_tokens_per_expert.tolist()
        return x[sent_T], topk_idx[sent_T], topk_weights[sent_T], counts, (is_token_in_rank,), SimpleNamespace()

    def combine(self, x: torch.Tensor, handle: tuple[torch.Tensor]) -> tuple[Any, ...]:
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        out_TM = torch.zeros(len(handle[0]), x.shape[1], dtype=torch.bfloat16)
        out_TM[handle[0][:, 0]] = x
        return out_TM, None, SimpleNamespace()


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("deep_ep")
    module.Buffer = DocumentedBuffer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_ep", module)


def test_a_missing_package_is_named_with_what_to_install(
    lone_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"deepep needs the package deep_ep.*pip install sgl-deep-ep.*choose.* nccl"):
        DeepEPDispatcher(lone_group, **SIZES)


@pytest.mark.usefixtures("documented")
def test_a_row_that_deepep_cannot_move_is_refused(lone_group: dist.ProcessGroup) -> None:
    with pytest.raises(ConfigError, match="hidden_size is 12; the token dispatcher deepep needs a multiple of 8"):
        DeepEPDispatcher(lone_group, num_experts=4, hidden_size=12)


@pytest.mark.usefixtures("documented")
def test_float32_is_refused(lone_group: dist.ProcessGroup) -> None:
    dispatcher = DeepEPDispatcher(lone_group, **SIZES)
    with pytest.raises(ValueError, match=r"x_TM is torch.float32; the token dispatcher deepep sends torch.bfloat16"):
        dispatcher.dispatch(torch.zeros(1, 16), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))


@pytest.mark.usefixtures("documented")
def test_the_buffer_is_as_large_as_the_larger_of_dispatch_and_combine_needs(lone_group: dist.ProcessGroup) -> None:
    DeepEPDispatcher(lone_group, **SIZES)
    assert DocumentedBuffer.latest_bytes == (100 * 16 * 2, 7)


@pytest.mark.usefixtures("documented")
def test_rows_are_sent_and_sums_are_returned(lone_group: dist.ProcessGroup) -> None:
    dispatcher = DeepEPDispatcher(lone_group, **SIZES)
    assert not dispatcher.exact_order
    x_TM = torch.arange(48).view(3, 16).to(torch.bfloat16)
    ids_TK = torch.tensor([[1, 3], [-1, -1], [0, -1]], dtype=torch.int32)
    received = dispatcher.dispatch(x_TM, ids_TK, torch.ones(2, 3).t())
    assert received.ids_RK.dtype == torch.int32
    assert received.ids_RK.tolist() == [[1, 3], [0, -1]]
    out_TM = dispatcher.combine(received.x_RM.to(torch.float32) * 2, received)
    assert out_TM.dtype == torch.float32
    assert torch.equal(out_TM, x_TM.to(torch.float32) * torch.tensor([[2], [0], [2]]))
