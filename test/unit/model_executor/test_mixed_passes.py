"""Decode rows and prompts in one pass: each part is attended by itself, and all rows go to the experts together."""

from __future__ import annotations

import itertools

import pytest
import torch
from sequence_builders import in_force
from toy_model import ToyBackend, ToyFamily, ToyModel, by_hand, decode_batch, extend_batch

from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.core.units import SPLIT
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.layer_runner import LayerRunner

LAYERS = 3
OWN = "own pages"


class Pool:
    """A pool that knows to which pages its layers are redirected."""

    kv_location = OWN


class ToyStaging:
    """Memory from `first_kv_index` on. `asked` lists the calls of the pass, by the rules of a staging."""

    def __init__(self, name: str, pool: Pool, first_kv_index: int, spans=None) -> None:
        self.name, self._pool, self.first_kv_index, self.spans = name, pool, first_kv_index, spans
        self.asked: list[tuple[str, int, int]] = []

    def redirect_pool(self) -> None:
        assert self._pool.kv_location == OWN
        self._pool.kv_location = self.name

    def restore_pool(self) -> None:
        assert self._pool.kv_location == self.name
        self._pool.kv_location = OWN

    def before_attention(self, layer: int, index: int) -> None:
        self.asked.append(("wanted", layer, index))
        self.redirect_pool()

    def after_attention(self, layer: int, index: int, end: int) -> None:
        self.asked.append(("attended", layer, end))
        self.restore_pool()


class RecordingBackend(ToyBackend):
    """Records the pages of the pool's layers when a batch is planned."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool, self.planned_at = pool, list[tuple[str, str]]()

    def init_forward_metadata(self, batch) -> None:
        super().init_forward_metadata(batch)
        self.planned_at.append((batch.forward_mode.name, self.pool.kv_location))


class RecordingFamily(ToyFamily):
    """Records the pages of the pool's layers when attention of a batch runs, and the batch's KV indices."""

    def __init__(self, backend: RecordingBackend) -> None:
        super().__init__(backend)
        self.attended_at: list[tuple[str, str]] = []
        self.kv_indices: dict[str, list[int]] = {"DECODE": [], "EXTEND": []}

    def attention_half(self, layer, positions, hidden, residual, batch, rows=None):
        self.attended_at.append((batch.forward_mode.name, self.backend.pool.kv_location))
        if layer.index == 0:
            self.kv_indices[batch.forward_mode.name] += batch.out_cache_loc.tolist()
        return super().attention_half(layer, positions, hidden, residual, batch, rows)

    def final_norm(self, model, hidden, residual):
        return hidden + residual


class Mixed:
    """A pass over 7 decode rows and 10 rows of two prompts."""

    def __init__(
        self, *, b_attn: int = 100, yield_option: str = SPLIT, mix: int = 50, can_reenter: bool = True
    ) -> None:
        plan = Plan(
            prefill=PhasePlan(b_attn=b_attn, b_moe=100, yield_option=yield_option),
            decode=PhasePlan(b_attn=b_attn, b_moe=10, yield_option=yield_option),
            page_size=8,
            boundary_tokens=8,
            refill_watermark=0.5,
            ready_target=8,
            mix_prefill=mix,
        )
        self.pool, self.model, self.counters = Pool(), ToyModel(LAYERS), Counters()
        backend = RecordingBackend(self.pool)
        self.backend, self.family = backend, RecordingFamily(backend)
        self.runner = LayerRunner(
            model=self.model,
            family=self.family,
            attn_backend=backend,
            in_force=in_force(plan),
            counters=self.counters,
            can_reenter=can_reenter,
            expert_part="experts",
        )
        self.decode, self.prompts = decode_batch([5 + i for i in range(7)]), extend_batch([0, 3], [4, 6])
        self.prompts.input_ids = (self.prompts.input_ids + 11) % 97

    def run(self) -> list[tuple[torch.Tensor, object]]:
        return self.runner.forward_parts([self.decode, self.prompts])

    def check(self) -> None:
        """Both parts' logits are those of the whole model, to the bit, and each belongs to its batch."""
        for (logits, of), batch in zip(self.run(), (self.decode, self.prompts), strict=True):
            assert of.input_ids is batch.input_ids
            assert (of is batch) == (batch is self.decode)
            assert torch.equal(logits, by_hand(self.model, batch))


@pytest.mark.parametrize("b_attn", [1, 3, 7, 100])
def test_each_parts_result_is_that_of_a_pass_of_its_own(b_attn):
    mixed = Mixed(b_attn=b_attn)
    mixed.check()
    cuts = -(-7 // b_attn) + -(-10 // b_attn)
    assert [len(rows) for rows in mixed.family.attention_rows.values()] == [cuts] * LAYERS
    assert mixed.family.expert_rows == {0: [17], 1: [17], 2: [9]}, "one call over the rows of both"
    counts = mixed.counters.counts
    assert {name: counts[name] for name in ("mixed_passes", "decode_rows", "prefill_rows")} == {
        "mixed_passes": 1,
        "decode_rows": 7,
        "prefill_rows": 10,
    }
    assert "prefill_us" not in counts, "its time is not that of prompts alone"


@pytest.mark.parametrize(("mix", "rows"), [(7, [17]), (6, [16, 1]), (0, [10, 7])])
def test_an_expert_call_has_at_most_a_decode_group_and_its_mixed_prompt_tokens(mix, rows):
    mixed = Mixed(mix=mix)
    mixed.check()
    assert mixed.family.expert_rows == {0: rows, 1: rows, 2: [9]}


@pytest.mark.parametrize(("sink", "source", "b_attn"), list(itertools.product([True, False], [True, False], [3, 100])))
def test_each_part_has_its_own_staging_or_the_pools_own_pages(sink, source, b_attn):
    mixed = Mixed(b_attn=b_attn)
    if sink:
        mixed.runner.prefill_sink = ToyStaging("sink", mixed.pool, 100)
    if source:
        mixed.runner.decode_source = ToyStaging("source", mixed.pool, 200, spans=[(0, 2), (2, 7)])
    mixed.check()
    assert mixed.pool.kv_location == OWN
    kv_locations = {("DECODE", "source" if source else OWN), ("EXTEND", "sink" if sink else OWN)}
    assert set(mixed.backend.planned_at) == kv_locations
    assert set(mixed.family.attended_at) == kv_locations
    assert mixed.family.kv_indices == {
        "DECODE": [1000 + row - 200 * source for row in range(7)],
        "EXTEND": [1000 + row - 100 * sink for row in range(10)],
    }
    if source:
        steps = [("wanted", 0), ("attended", 2), ("wanted", 1), ("attended", 7)]
        assert mixed.runner.decode_source.asked == [(what, i, n) for i in range(LAYERS) for what, n in steps]
    if sink:
        ends = [3, 6, 9, 10] if b_attn == 3 else [10]
        steps = [step for number, end in enumerate(ends) for step in (("wanted", number), ("attended", end))]
        assert mixed.runner.prefill_sink.asked == [(what, i, n) for i in range(LAYERS) for what, n in steps]


def test_a_backend_that_holds_the_metadata_of_one_batch_takes_one_batch_a_pass():
    mixed = Mixed(can_reenter=False)
    with pytest.raises(AssertionError, match="holds the metadata of one batch"):
        mixed.run()
