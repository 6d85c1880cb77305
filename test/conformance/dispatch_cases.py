"""Owns the batches that every token dispatcher must exchange. Each process makes them from their seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# How the tokens are distributed over the ranks at the start.
SPLITS = ("even", "first only", "last only", "none on the last", "one on the first", "random")


@dataclass(frozen=True, kw_only=True)
class Case:
    """The tokens of all ranks. The split and the number of ranks give the tokens of each rank."""

    name: str
    num_tokens: int = 64
    top_k: int = 4
    num_experts: int = 24  # divisible by 1, 2, 3 and 4 ranks, and not a power of two
    hidden_size: int = 24
    dtype: torch.dtype = torch.float32
    routing: str = "random"
    split: str = "even"
    seed: int = 0

    def tokens_per_rank(self, world_size: int) -> list[int]:
        """Return the number of tokens of each rank."""
        count = self.num_tokens
        if self.split == "first only":
            return [count] + [0] * (world_size - 1)
        if self.split == "last only":
            return [0] * (world_size - 1) + [count]
        if self.split == "none on the last" and world_size > 1:
            return [*replace(self, split="even").tokens_per_rank(world_size - 1), 0]
        if self.split == "one on the first" and world_size > 1 and count:
            rest = replace(self, split="even", num_tokens=count - 1)
            return [1, *rest.tokens_per_rank(world_size - 1)]
        if self.split == "random":
            draws = torch.randint(world_size, (count,), generator=_generator(self.seed))
            return torch.bincount(draws, minlength=world_size).tolist()
        return [count * (rank + 1) // world_size - count * rank // world_size for rank in range(world_size)]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x [N, M], expert ids [N, K] in int32 and weights [N, K] of all tokens."""
        generator = _generator(self.seed)
        x_NM = torch.randn(self.num_tokens, self.hidden_size, generator=generator).to(self.dtype)
        x_NM[::2, 0] = -0.0  # an expert that is not chosen must not change even the sign of a zero
        weights_NK = torch.rand(self.num_tokens, self.top_k, generator=generator)
        return x_NM, self._ids(generator).to(torch.int32), weights_NK

    def shard(self, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the part of the batch that this rank begins with."""
        counts = self.tokens_per_rank(world_size)
        x_NM, ids_NK, weights_NK = (part.split(counts)[rank] for part in self.batch())
        return x_NM, ids_NK, weights_NK

    def _ids(self, generator: torch.Generator) -> torch.Tensor:
        scores_NE = torch.rand(self.num_tokens, self.num_experts, generator=generator)
        if self.routing == "lowest":  # all on the first rank
            return torch.arange(self.top_k).expand(self.num_tokens, -1)
        if self.routing == "highest, backwards":  # all on the last rank
            return (self.num_experts - 1 - torch.arange(self.top_k)).expand(self.num_tokens, -1)
        if self.routing == "spread":  # to as many ranks as a token has choices
            step = self.num_experts // self.top_k
            return (torch.arange(self.top_k) * step).expand(self.num_tokens, -1)
        if self.routing == "each to another":  # neighbours in the batch go to different ranks
            first_N1 = torch.arange(self.num_tokens)[:, None] * 7
            return (first_N1 + torch.arange(self.top_k)) % self.num_experts
        if self.routing == "skewed":  # most rows to a few experts of the second quarter
            scores_NE[:, self.num_experts // 4 : self.num_experts // 2] += 0.8
        ids_NK = scores_NE.argsort(1, descending=True)[:, : self.top_k]
        if self.routing == "padded":  # some choices have no expert, and every third token has none
            ids_NK = ids_NK.masked_fill(torch.rand(ids_NK.shape, generator=generator) < 0.4, -1)
            ids_NK[::3] = -1
        return ids_NK


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _random_case(seed: int) -> Case:
    generator = _generator(1000 + seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    routings = ("random", "skewed", "padded", "each to another")
    return Case(
        name=f"random {seed}",
        num_tokens=draw(0, 200),
        top_k=draw(1, 8),
        num_experts=(12, 24, 60, 96)[draw(0, 3)],
        hidden_size=draw(1, 40),
        dtype=(torch.float32, torch.bfloat16)[draw(0, 1)],
        routing=routings[draw(0, 3)],
        split=SPLITS[draw(0, len(SPLITS) - 1)],
        seed=seed,
    )


CASES = (
    Case(name="no token on any rank", num_tokens=0),
    Case(name="one token", num_tokens=1, split="first only"),
    Case(name="one token on the last rank", num_tokens=1, split="last only", dtype=torch.bfloat16),
    *(Case(name=f"{count} tokens", num_tokens=count, split="random", seed=count) for count in (2, 3, 5, 17, 333)),
    Case(name="4096 tokens in float32", num_tokens=4096, top_k=8, hidden_size=32),
    Case(name="4096 tokens in bfloat16", num_tokens=4096, top_k=8, hidden_size=32, dtype=torch.bfloat16),
    Case(name="one token after 4096", num_tokens=1, split="first only"),
    *(Case(name=f"tokens {split}", split=split) for split in SPLITS),
    *(Case(name=f"top {top_k}", top_k=top_k, dtype=torch.bfloat16, seed=top_k) for top_k in range(1, 9)),
    Case(name="all to the first rank", routing="lowest"),
    Case(name="all to the last rank, backwards", routing="highest, backwards"),
    Case(name="all of the first rank's to the last", routing="highest, backwards", split="first only"),
    Case(name="all of the last rank's to the first", routing="lowest", split="last only", top_k=1),
    Case(name="every token to every rank", routing="spread", num_experts=48, top_k=8),
    Case(name="neighbours to different ranks", routing="each to another", top_k=2),
    Case(name="skewed", routing="skewed", split="random", num_tokens=200),
    Case(name="choices and tokens without experts", routing="padded", top_k=8),
    Case(name="padded in bfloat16", routing="padded", top_k=2, dtype=torch.bfloat16, split="random"),
    Case(name="as many choices as experts", num_experts=12, top_k=12),
    Case(name="one expert on each of four ranks", num_experts=4, top_k=3),
    Case(name="60 experts", num_experts=60, top_k=6),
    Case(name="a row of one number", hidden_size=1, dtype=torch.bfloat16, top_k=1),
    Case(name="an odd number of bfloat16 in a row", hidden_size=13, dtype=torch.bfloat16, top_k=3),
    *(_random_case(seed) for seed in range(20)),
)
