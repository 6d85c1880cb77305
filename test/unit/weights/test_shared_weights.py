"""Each rank loads some of the large matrices for all ranks, and its experts and all small tensors for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from gloo_pairs import gloo_groups
from torch import Tensor, nn

from sgl_batch.distributed.shared_arena import SharedArena
from sgl_batch.errors import ConfigError
from sgl_batch.weights.loaded_weights import LoadedWeights
from sgl_batch.weights.shared_weights import SharedWeights

NUM_LAYERS = 2
WIDE = (256, 160)
SMALL = (4, 160)
LARGE_ONES = ["embed.weight", "lm_head.weight", *(f"layers.{layer}.o_proj.weight" for layer in range(NUM_LAYERS))]
OWN_ONES = [
    f"layers.{layer}.{name}.weight" for layer in range(NUM_LAYERS) for name in ("gate", "kv_b_proj", "experts.0.w1")
]


class Model(nn.Module):
    """Has parameters of the names of a checkpoint's tensors, into which it copies them."""

    def __init__(self) -> None:
        super().__init__()
        for name in LARGE_ONES + OWN_ONES:
            *modules, last = name.split(".")
            module: nn.Module = self
            for part in modules:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            shape = SMALL if "gate" in name else WIDE
            module.register_parameter(last, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            parameters[name].data.copy_(weight)


@dataclass
class Rank:
    """A rank that loads a checkpoint."""

    group: Any
    model: Model = field(default_factory=Model)
    given: list[str] = field(default_factory=list)
    arena: SharedArena | None = None

    def process_group(self, name: str, backend: str) -> Any:
        return self.group

    def load(self, checkpoint: dict[str, Tensor], *, may_share: bool = True, int8: bool = False) -> None:
        def share(arena: SharedArena) -> None:
            self.arena = arena

        def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
            weights = list(weights)
            self.given = [name for name, _ in weights]
            self.model.load_weights(weights)

        watch = LoadedWeights(NUM_LAYERS, is_tied=False, is_elsewhere=lambda _: False)
        ranks: Any = self
        shared = SharedWeights(watch, ranks, int8=int8, may_share=lambda _: may_share, share=share)
        shared.load(self.model, checkpoint.items(), load_weights)


@pytest.fixture
def checkpoint() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {name: SMALL if "gate" in name else WIDE for name in LARGE_ONES + OWN_ONES}
    return {name: torch.randn(shape, generator=draw).to(torch.bfloat16) for name, shape in shapes.items()}


def loaded(number: int, load: Callable[[Rank], None]) -> list[Rank]:
    ranks = [Rank(group) for group in gloo_groups(number)]
    with ThreadPoolExecutor(number) as pool:
        list(pool.map(load, ranks))
    return ranks


def has_all(rank: Rank, checkpoint: dict[str, Tensor]) -> bool:
    return all(torch.equal(one.data, checkpoint[name]) for name, one in rank.model.named_parameters())


@pytest.mark.parametrize("int8", [False, True])
def test_all_ranks_have_what_one_of_them_has_loaded(checkpoint, int8):
    ranks = loaded(2, lambda rank: rank.load(checkpoint, int8=int8))
    assert all(has_all(rank, checkpoint) for rank in ranks)
    given = [name for rank in ranks for name in rank.given]
    assert sorted(given) == sorted([*LARGE_ONES, *OWN_ONES, *OWN_ONES])
    assert all(set(OWN_ONES) < set(rank.given) for rank in ranks)
    for rank in ranks:
        assert rank.arena is not None
        assert {name for name, one in rank.model.named_parameters() if one in rank.arena} == set(LARGE_ONES)


def test_a_matrix_that_is_tied_to_another_stays_tied(checkpoint):
    def tie(rank: Rank) -> None:
        rank.model.get_submodule("lm_head").weight = rank.model.get_submodule("embed").weight
        rank.load({name: one for name, one in checkpoint.items() if name != "lm_head.weight"})

    for rank in loaded(2, tie):
        assert rank.model.get_submodule("lm_head").weight.data_ptr() == rank.model.embed.weight.data_ptr()


def test_a_model_that_may_not_share_is_loaded_whole_by_each_rank(checkpoint):
    for rank in loaded(2, lambda rank: rank.load(checkpoint, may_share=False)):
        assert rank.arena is None
        assert set(rank.given) == set(checkpoint)
        assert has_all(rank, checkpoint)


def test_a_rank_alone_loads_everything(checkpoint):
    (rank,) = loaded(1, lambda rank: rank.load(checkpoint))
    assert rank.arena is None
    assert has_all(rank, checkpoint)


def test_a_shared_matrix_that_a_checkpoint_lacks_is_named(checkpoint):
    del checkpoint["layers.1.o_proj.weight"]
    with pytest.raises(ConfigError, match=r"nothing for 1 parameters of the model: layers\.1\.o_proj\.weight"):
        loaded(2, lambda rank: rank.load(checkpoint))
