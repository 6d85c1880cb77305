"""Results do not depend on the order in which the units of a pass run, if only it is admissible."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from sequence_builders import in_force
from toy_model import ToyBackend, ToyFamily, ToyModel, by_hand, decode_batch, extend_batch

from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.core.units import FUSED, SPLIT, YIELD_OPTIONS, PassShape, Unit, admissible
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.layer_runner import LayerRunner

LAYERS = 4


class AnyOrder:
    """Draws one admissible unit after the other; `ran`: what was drawn."""

    def __init__(self, seed: int) -> None:
        self._random, self.ran = random.Random(seed), list[Unit]()

    def __call__(self, shape: PassShape) -> Iterator[Unit]:
        while units := admissible(shape, set(self.ran)):
            self.ran.append(self._random.choice(units))
            yield self.ran[-1]


def runner(yield_option: str, order: AnyOrder, family: type[ToyFamily] = ToyFamily, b_moe: int = 100) -> LayerRunner:
    phase = PhasePlan(b_attn=3, b_moe=b_moe, yield_option=yield_option)
    plan = Plan(
        prefill=phase,
        decode=phase,
        page_size=8,
        boundary_tokens=8,
        refill_watermark=0.5,
        ready_target=8,
    )
    backend = ToyBackend()
    made = LayerRunner(
        model=ToyModel(LAYERS),
        family=family(backend),
        attn_backend=backend,
        in_force=in_force(plan),
        counters=Counters(),
        can_reenter=True,
        expert_part="experts",
    )
    made.order = order
    return made


@pytest.mark.parametrize("yield_option", YIELD_OPTIONS)
@pytest.mark.parametrize("seed", range(8))
def test_an_admissible_order_gives_the_whole_models_result_to_the_bit(yield_option: str, seed: int) -> None:
    order = AnyOrder(seed)
    made = runner(yield_option, order, b_moe=100 if seed % 2 else 8)
    batches = [decode_batch([5 + row for row in range(11)]), extend_batch([0, 3], [4, 6])]
    for (logits, _), batch in zip(made.forward_parts(batches), batches, strict=True):
        assert torch.equal(logits, by_hand(made.model, batch))
    numbers = [unit.number for unit in order.ran if unit.layer == 0 and unit.kind != "experts"]
    assert sorted(numbers) == list(range(8))
    layers = [unit.layer for unit in order.ran]
    assert (layers == sorted(layers)) == (yield_option == SPLIT), "fused sub-batches run ahead of others by layers"


def test_experts_that_are_fused_are_called_once_for_each_sub_batch_as_soon_as_it_yields() -> None:
    made = runner(FUSED, AnyOrder(1))
    made.forward(decode_batch([5, 6, 7, 8]))
    steps = made.family.order
    for step, then in pairwise(steps):
        if step.startswith("attention"):
            assert then == step.replace("attention", "experts")


def test_an_option_that_the_family_does_not_offer_is_an_error() -> None:
    class SplitAlone(ToyFamily):
        yield_options = (SPLIT,)

    with pytest.raises(AssertionError, match="fused is not offered"):
        runner(FUSED, AnyOrder(0), SplitAlone).forward(decode_batch([5]))


def test_staged_kv_requires_the_static_order() -> None:
    class Staging:
        first_kv_index, spans = 0, None

        def redirect_pool(self) -> None:
            """Nowhere."""

        def restore_pool(self) -> None:
            """From nowhere."""

    made = runner(SPLIT, AnyOrder(0))
    made.prefill_sink = Staging()
    with pytest.raises(AssertionError, match="need the static order"):
        made.forward(extend_batch([0], [4]))
