"""A set of ranks is made once, where passes can be shared; products are shared inside a pass alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from column_gathers import splits
from sequence_builders import in_force
from toy_model import ToyBackend, ToyFamily, ToyModel, by_hand, decode_batch

from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.core.topology import Topology
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.errors import ConfigError
from sgl_batch.layers.column_split import ColumnSplit, PassSplit
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor import partition_set
from sgl_batch.model_executor.layer_runner import LayerRunner
from sgl_batch.model_executor.partition_set import PartitionSet, PartitionSets


def sets_of(directory: Path, *, device: str = "cpu") -> PartitionSets:
    rank_context = RankContext(rank=1, topology=Topology.uniform(3), directory=directory)
    return PartitionSets(rank_context, Counters(), device=device, through_memory=True)


def test_a_set_is_made_once_and_knows_whether_it_has_all_ranks(tmp_path):
    sets = sets_of(tmp_path)
    alone = sets.of([1])
    assert (alone.split.rank, alone.split.size, alone.is_all) == (0, 1, False)
    assert sets.of((1,)) is alone


@pytest.mark.parametrize(
    ("ranks", "fault"), [([0, 2], "rank 1 is not in"), ([1, 0], "ascending"), ([1, 1], "ascending")]
)
def test_a_set_is_named_by_ascending_ranks_with_this_one(ranks, fault, tmp_path):
    with pytest.raises(AssertionError, match=fault):
        sets_of(tmp_path).of(ranks)


def test_a_gpu_and_a_cpu_without_kernels_refuse_to_share_passes(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"computes on cuda with them: do not partition sequences"):
        sets_of(tmp_path, device="cuda").of([1])
    monkeypatch.setattr(partition_set, "native_kernels", lambda: None)
    with pytest.raises(ConfigError, match=r"computes on cpu without them: do not partition sequences"):
        sets_of(tmp_path).of([1])


class Watched(ToyFamily):
    """Notes the split under which each part of a pass runs; fails where it is told to."""

    def __init__(self, backend: ToyBackend, split: PassSplit, *, fails: bool) -> None:
        super().__init__(backend)
        self.split, self.fails, self.seen = split, fails, set[ColumnSplit | None]()

    def attention_half(self, *given):
        self.seen.add(self.split.current)
        return super().attention_half(*given)

    def expert_half(self, *given):
        self.seen.add(self.split.current)
        if self.fails:
            raise RuntimeError("the experts failed")
        return super().expert_half(*given)


def runner_of(model: ToyModel, *, fails: bool = False) -> LayerRunner:
    backend, split, phase = ToyBackend(), PassSplit(), PhasePlan(b_attn=2, b_moe=8)
    plan = Plan(prefill=phase, decode=phase, page_size=8, boundary_tokens=8, refill_watermark=0.5, ready_target=8)
    return LayerRunner(
        model=model,
        family=Watched(backend, split, fails=fails),
        attn_backend=backend,
        in_force=in_force(plan),
        counters=Counters(),
        can_reenter=True,
        expert_part="experts",
        split=split,
    )


def test_products_read_the_split_of_the_set_inside_a_pass_alone():
    model, batch, (split,) = ToyModel(2), decode_batch([3, 4, 5]), splits(1)
    runner = runner_of(model)
    expected = by_hand(model, batch)
    assert torch.equal(runner.forward(batch)[0], expected)
    assert runner.family.seen == {None}
    runner.family.seen.clear()
    runner.partition = PartitionSet(split=split, is_all=True)
    assert torch.equal(runner.forward(batch)[0], expected)
    assert runner.family.seen == {split}
    assert runner.family.split.current is None
    assert runner.counters.counts["partitioned_passes"] == 1


def test_a_pass_that_fails_leaves_no_split_behind():
    runner, (split,) = runner_of(ToyModel(2), fails=True), splits(1)
    runner.partition = PartitionSet(split=split, is_all=True)
    with pytest.raises(RuntimeError, match="the experts failed"):
        runner.forward(decode_batch([3]))
    assert runner.family.split.current is None
