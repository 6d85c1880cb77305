"""What rows of a batch ask for is known on the host, also when rows leave or join."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.sampling_rows import keep_rows_on_host

with bootstrap.importing():
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


def batch_of(*asked: tuple[int, float, float]) -> Any:
    """A batch whose requests ask for these top_k, top_p and min_p."""
    top_ks, top_ps, min_ps = (torch.tensor(column) for column in zip(*asked, strict=True))
    info = SamplingBatchInfo(
        temperatures=torch.ones(len(asked), 1),
        top_ks=top_ks,
        top_ps=top_ps,
        min_ps=min_ps,
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=True,
        need_top_k_sampling=True,
        need_min_p_sampling=True,
        vocab_size=10,
        penalizer_orchestrator=SimpleNamespace(filter=lambda rows: None, merge=lambda other: None),
    )
    parameters = [SimpleNamespace(top_k=top_k, top_p=top_p, min_p=min_p) for top_k, top_p, min_p in asked]
    batch = SimpleNamespace(sampling_info=info, reqs=[SimpleNamespace(sampling_params=one) for one in parameters])
    keep_rows_on_host(batch)
    return batch


def test_rows_follow_those_on_the_device_when_some_leave_and_others_join() -> None:
    info = batch_of((1, 1.0, 0.0), (40, 0.5, 0.0), (7, 1.0, 0.25)).sampling_info
    info.groups = ["of these rows"]
    info.filter_batch([2, 0], torch.tensor([2, 0]))
    assert info.groups is None
    info.groups = ["of those that stay"]
    info.merge_batch(batch_of((5, 0.75, 0.5)).sampling_info)
    assert info.groups is None
    assert [tuple(row) for row in info.rows] == [(7, 1.0, 0.25), (1, 1.0, 0.0), (5, 0.75, 0.5)]
    assert [list(one) for one in (info.top_ks, info.top_ps, info.min_ps)] == [[7, 1, 5], [1, 1, 0.75], [0.25, 0, 0.5]]
