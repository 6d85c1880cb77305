"""Owns the work of each regime at each scale. Sizes for a GPU are computed for one H200, and have not run there."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The work of a regime. Lengths are in tokens.

    `pool_tokens`: of KV, all that the device may hold, where the regime sets that. `budget_bytes`: of device memory,
    where it sets that. `store_bytes`: of our host KV store, and about what stock's hierarchical cache gets.
    """

    layers: int
    num_prompts: int
    input_len: int
    output_len: int
    pool_tokens: int = 0
    budget_bytes: int = 0
    store_bytes: int = 0

    @property
    def need_tokens(self) -> int:
        return self.num_prompts * (self.input_len + self.output_len)


# 131,072 tokens are 12 GiB of KV in 48 layers; 640 sequences of 2,048 need ten times that.
FULL = {
    "kv": Sizes(layers=48, num_prompts=640, input_len=1024, output_len=1024, pool_tokens=131072, store_bytes=64 * GIB),
    "tight": Sizes(layers=96, num_prompts=256, input_len=512, output_len=512, store_bytes=48 * GIB),
    "weights": Sizes(layers=32, num_prompts=512, input_len=128, output_len=64, budget_bytes=24 * GIB),
    "prefill": Sizes(layers=48, num_prompts=64, input_len=8192, output_len=1024),
    "resident": Sizes(layers=48, num_prompts=512, input_len=512, output_len=512),
    "accumulation": Sizes(layers=48, num_prompts=1024, input_len=128, output_len=128),
    "accumulation-graphs": Sizes(layers=48, num_prompts=1024, input_len=128, output_len=128),
}
TINY = {
    "kv": Sizes(layers=2, num_prompts=40, input_len=16, output_len=48, pool_tokens=256, store_bytes=16 << 20),
    "tight": Sizes(layers=4, num_prompts=32, input_len=32, output_len=32, pool_tokens=512, store_bytes=16 << 20),
    "weights": Sizes(layers=4, num_prompts=32, input_len=16, output_len=16, budget_bytes=2 << 20),
    "prefill": Sizes(layers=2, num_prompts=8, input_len=512, output_len=16),
    "resident": Sizes(layers=2, num_prompts=32, input_len=16, output_len=48),
    "accumulation": Sizes(layers=2, num_prompts=64, input_len=16, output_len=16),
    "accumulation-graphs": Sizes(layers=2, num_prompts=64, input_len=16, output_len=16),
}
SCALES = {"full": FULL, "tiny": TINY}
