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
from sgl_batch.weights.load_share import LoadShare
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

    def load(
        self,
        checkpoint: dict[str, Tensor],
        *,
        may_share: bool = True,
        small_bytes: int = 0,
        experts: range | None = None,
    ) -> None:
        def share(arena: SharedArena) -> None:
            self.arena = arena

        def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
            weights = list(weights)
            self.given = [name for name, _ in weights]
            self.model.load_weights(weights)

        watch = LoadedWeights(NUM_LAYERS, is_tied=False, is_elsewhere=lambda _: False)
        ranks: Any = self
        shared = SharedWeights(
            watch,
            ranks,
            loads=LoadShare(experts),
            small_bytes=lambda _: small_bytes,
            may_share=lambda _: may_share,
            share=share,
        )
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


@pytest.mark.parametrize("small_bytes", [0, 1 << 20])
def test_all_ranks_have_what_one_of_them_has_loaded(checkpoint, small_bytes):
    ranks = loaded(2, lambda rank: rank.load(checkpoint, small_bytes=small_bytes))
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


@pytest.mark.parametrize("may_share", [True, False])
def test_a_rank_is_not_given_the_experts_of_others(checkpoint, may_share):
    more = {f"layers.0.experts.{number}.w1.weight": checkpoint["embed.weight"] for number in range(1, 4)}
    for rank in loaded(2, lambda rank: rank.load(checkpoint | more, may_share=may_share, experts=range(1))):
        assert not set(more) & set(rank.given)
        assert has_all(rank, checkpoint)


def test_a_share_has_whole_layers_and_every_small_tensor():
    shares = [LoadShare(range(rank, rank + 1)) for rank in range(2)]
    for index, share in enumerate(shares):
        share.divide(index, 2)

    def loaders(name: str, *shape: int) -> list[int]:
        return [index for index, share in enumerate(shares) if share.has(name, shape)]

    assert loaders("model.layers.3.self_attn.q_proj.weight", *WIDE) == [1]
    assert loaders("model.layers.3.self_attn.o_proj.weight", *WIDE) == [1]
    assert loaders("model.layers.4.self_attn.o_proj.weight", *WIDE) == [0]
    assert loaders("model.embed_tokens.weight", *WIDE) == [0]
    assert loaders("lm_head.weight", *WIDE) == [1]
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):  # which are joined
        assert loaders(f"model.layers.3.self_attn.{name}.weight", *SMALL) == [1]
    assert loaders("model.layers.3.mlp.experts.1.up_proj.weight", *WIDE) == [1]
    for name, shape in (("input_layernorm.weight", (160,)), ("kv_b_proj.weight", WIDE), ("mlp.gate.weight", SMALL)):
        assert loaders(f"model.layers.3.{name}", *shape) == [0, 1]
    assert loaders("model.layers.3.mlp.experts.gate_up_proj", 2, *WIDE) == [0, 1]


def test_a_shared_matrix_that_a_checkpoint_lacks_is_named(checkpoint):
    del checkpoint["layers.1.o_proj.weight"]
    with pytest.raises(ConfigError, match=r"nothing for 1 parameters of the model: layers\.1\.o_proj\.weight"):
        loaded(2, lambda rank: rank.load(checkpoint))
