"""Owns how GPUs are shared out: so many instances of so many ranks each, and what of that the engine has built.

Ranks of the engine have sequences of their own, the whole of attention, and a share of the routed experts. Two other
layouts are modelled only, so that a plan can say what they would be worth: ranks of one instance on several machines,
and tensor parallel ones, which all compute the same sequences, each with a part of every matrix and of the KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import NOT_IMPLEMENTED
from sgl_batch.planner.model_layers import MOE, ModelLayers
from sgl_batch.planner.workload import Workload

# GPUs of the machines that are rented: one board of eight.
GPUS_OF_A_MACHINE = 8
_MOST_GPUS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """So many instances, each of so many ranks with a GPU each. `tensor`: whether the ranks are tensor parallel."""

    instances: int = 1
    ranks: int = 1
    tensor: bool = False

    @property
    def gpus(self) -> int:
        """Return the GPUs of all instances."""
        return self.instances * self.ranks

    @property
    def machines(self) -> int:
        """Return the machines of one instance."""
        return -(-self.ranks // GPUS_OF_A_MACHINE)

    @property
    def is_implemented(self) -> bool:
        """Return whether an instance can run so."""
        return not self.tensor and self.machines == 1

    @property
    def label(self) -> str:
        """Return NOT_IMPLEMENTED with what is not built; empty for what is."""
        lacks = [*(["tensor parallel"] if self.tensor else []), *(["several machines"] if self.machines > 1 else [])]
        return f"{NOT_IMPLEMENTED}: {', '.join(lacks)}" if lacks else ""

    @property
    def parts(self) -> int:
        """Return into how many parts the sequences of a batch are split: a rank's own ones, or an instance's."""
        return self.instances if self.tensor else self.gpus

    @property
    def flags(self) -> list[str]:
        """Return SGLang's flags of an instance; none for what cannot run."""
        if self.ranks == 1 or not self.is_implemented:
            return []
        ranks = str(self.ranks)
        return ["--tp", ranks, "--dp", ranks, "--ep", ranks, "--enable-dp-attention"]

    def text(self) -> str:
        """Return the layout in words."""
        of = "1 GPU" if self.ranks == 1 else f"{self.ranks} {'tensor parallel ' if self.tensor else ''}ranks"
        return f"{self.instances} instance{'s' if self.instances > 1 else ''} of {of}"


ONE_GPU: Final = Layout()


def parse_gpus(text: str) -> int:
    """Return the number of GPUs that `--gpus` says. Raises ConfigError for any other text."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(_MOST_GPUS)) else 0
    if not 1 <= number <= _MOST_GPUS:
        raise ConfigError(f"--gpus is {text!r}; it takes a number of GPUs from 1 to {_MOST_GPUS:,}")
    return number


def layouts(gpus: int, model: ModelLayers) -> list[Layout]:
    """Return the layouts of so many GPUs, the fewest ranks first.

    Ranks divide the number of experts. A model without experts is whole on each rank, so that further ranks are further
    instances. Tensor parallel ranks divide the KV heads, or share one.
    """
    divisors = [ranks for ranks in range(1, gpus + 1) if gpus % ranks == 0]
    shared = [ranks for ranks in divisors if ranks == 1 or (MOE in model.layers and model.experts % ranks == 0)]
    tensor = [ranks for ranks in divisors if 1 < ranks <= GPUS_OF_A_MACHINE and max(model.kv_heads, ranks) % ranks == 0]
    return [
        *(Layout(instances=gpus // ranks, ranks=ranks) for ranks in shared),
        *(Layout(instances=gpus // ranks, ranks=ranks, tensor=True) for ranks in tensor),
    ]


def rank_layers(model: ModelLayers, layout: Layout) -> ModelLayers:
    """Return a model as one rank of a layout has it."""
    if not layout.tensor:
        return replace(model, ranks=layout.ranks)
    ranks = layout.ranks
    return replace(
        model,
        attention_bytes=model.attention_bytes / ranks,
        dense_bytes=model.dense_bytes / ranks,
        expert_bytes_each=model.expert_bytes_each / ranks,
        stored_expert_bytes=model.stored_expert_bytes / ranks,
        shared_bytes=model.shared_bytes / ranks,
        head_bytes=model.head_bytes / ranks,
        embedding_bytes=model.embedding_bytes / ranks,
        prefill_flop=model.prefill_flop / ranks,
        decode_flop=model.decode_flop / ranks,
        kv_layer_bytes=model.kv_layer_bytes / kv_parts(model, layout),
    )


def kv_parts(model: ModelLayers, layout: Layout) -> int:
    """Return into how many parts the ranks of a layout split the KV of a sequence. Latent KV has one head."""
    return min(layout.ranks, model.kv_heads) if layout.tensor else 1


def share_of(workload: Workload, layout: Layout, count: int | None = None) -> Workload:
    """Return the part of a batch that one rank computes: evenly spaced requests of it, in order, rounded up.

    `count`: of so many requests with the same mix of lengths; None for the whole batch.
    """
    whole = workload.count if count is None else count
    mine = -(-whole // layout.parts)
    requests = workload.requests
    if mine >= len(requests):
        return replace(workload, count=mine)
    return Workload(requests=[requests[index * len(requests) // mine] for index in range(mine)], count=mine)


def exchange_row_bytes(model: ModelLayers, layout: Layout) -> float:
    """Return the bytes that a row of a rank sends, and gets, in a layer: its hidden state there, and sums back.

    A row goes once to each other rank that has one of its experts, with 8 bytes for each choice, and comes back in
    float32 (layers/moe/token_dispatcher). Tensor parallel ranks add their sums up twice a layer, each time in a ring.
    """
    others = layout.ranks - 1
    if layout.tensor:
        return 2 * 2 * others / layout.ranks * model.hidden_bytes
    reached = others * (1 - (1 - 1 / layout.ranks) ** model.top_k)
    return reached * (model.hidden_bytes + 8 * model.top_k + 2 * model.hidden_bytes)
