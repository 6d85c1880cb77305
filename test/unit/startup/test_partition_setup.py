"""Costs of partitions are measured by all ranks where asked for, kept by the control rank, and read again by it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sgl_batch.config import from_mapping
from sgl_batch.core.partition_costs import PartitionCosts
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.topology import Topology
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.startup import partition_setup
from sgl_batch.startup.partition_setup import settle_partitions

RANKS = 2


class Trial:
    """Stands in for the passes of `PartitionTrial`. Shared ones take half the time. 2,000 tokens have room."""

    asked: list[tuple[str, int, bool]]

    def __init__(self, runner: object, plan: object, *, rank: int, ranks: int) -> None:
        assert (rank < ranks, ranks) == (True, RANKS)

    def fits(self, sequences: int, tokens: int) -> bool:
        return sequences * tokens <= 2000

    def step_s(self, sequences: int, context: int, *, shared: bool) -> float:
        self.asked.append(("step", sequences, shared))
        return (sequences + context / 960) / (1 + shared)

    def prompt_s(self, tokens: int, *, shared: bool) -> float:
        self.asked.append(("prompt", tokens, shared))
        return tokens / (1 + shared)


@pytest.fixture
def settle(tmp_path, monkeypatch):
    """Return what a rank settles with these flags; `agreed` has what it tells the others, and all agree with it."""
    monkeypatch.setattr(partition_setup, "PartitionTrial", Trial)
    monkeypatch.setattr(partition_setup, "choice_directory", lambda: tmp_path / "choices")
    monkeypatch.setattr(Trial, "asked", [], raising=False)
    agreed: list[bool] = []

    def settled(rank: int = 0, *, verdict: bool | None = None, dtype=torch.bfloat16, **flags) -> PartitionCosts | None:
        in_force = PlanInForce(from_mapping({"b_moe_decode": 16, **flags}))
        in_force.fit(page_size=64, max_running=32, can_reenter=True)
        context = RunContext(
            in_force=in_force,
            rendezvous=Rendezvous(Path(tmp_path)),
            rank_context=RankContext(rank=rank, topology=Topology.uniform(RANKS), directory=tmp_path),
        )
        runner = SimpleNamespace(
            expert_runner="native",
            kv_token_bytes=1000,
            model_config=SimpleNamespace(dtype=dtype),
            server_args=SimpleNamespace(model_path="tiny", kv_cache_dtype="auto"),
        )

        def all_done(done: bool) -> bool:
            agreed.append(done)
            return done if verdict is None else verdict

        return settle_partitions(runner, context, all_done)

    settled.agreed = agreed
    return settled


def test_all_ranks_measure_the_same_passes_and_the_control_rank_keeps_them(settle):
    costs = settle(partition_costs="measure")
    assert (costs.ranks, costs.sequences, costs.prompt_tokens) == (2, (1, 2, 4, 8), (128, 512))
    assert costs.alone.kv_token_s == pytest.approx(1 / 960)
    assert (costs.least_prompt_tokens, costs.move_token_s) == (128, 1000 / 0.5e9)
    asked, settle.agreed[:] = list(Trial.asked), []
    Trial.asked.clear()
    assert settle(partition_costs="measure") == costs == settle()
    assert (settle.agreed, Trial.asked) == ([True], []), "they are kept"
    assert settle(rank=1, verdict=False, partition_costs="measure") == costs
    assert Trial.asked == asked


def test_nothing_is_measured_unless_asked_for(settle):
    assert (settle(), settle(rank=1), settle(partition_costs="off")) == (None, None, None)
    assert settle.agreed == Trial.asked == []


def test_kept_costs_are_for_one_kind_of_number_and_can_be_left_out(settle):
    assert settle(partition_costs="measure") is not None
    assert settle(dtype=torch.float32) is None
    assert settle(partition_costs="off") is None


def test_another_rank_has_no_costs_where_the_control_rank_has_kept_ones(settle):
    assert settle(rank=1, partition_costs="measure") is None
    assert (settle.agreed, Trial.asked) == ([True], [])


def test_more_sequences_than_run_at_once_are_not_measured_nor_is_what_does_not_fit(settle, monkeypatch):
    assert settle(partition_costs="measure", b_moe_decode=3).sequences == (1, 2)
    monkeypatch.setattr(Trial, "fits", lambda self, sequences, tokens: False)
    assert settle(partition_costs="measure", b_moe_decode=3, accumulate=False) is None


def test_a_kept_file_with_other_numbers_is_not_used(settle, tmp_path, caplog):
    settle(partition_costs="measure")
    (path,) = (tmp_path / "choices").glob("*.json")
    kept = json.loads(path.read_text())
    kept["choice"]["numbers"]["step alone"] = [1.0]
    path.write_text(json.dumps(kept))
    with caplog.at_level("WARNING", partition_setup.__name__):  # other tests may have set the level of all loggers
        assert settle() is None
    assert "the kept costs of partitions are not used" in caplog.text
