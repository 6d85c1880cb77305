"""Owns a model small enough to understand: layers that compute each row by itself, and a list of all calls.

Its family and its attention backend stand where SGLang's would; forward batches are SGLang's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sgl_batch.model_executor.families import Family
from sgl_batch.model_executor.families.base import kept_rows

VOCAB_SIZE, HIDDEN = 97, 5


def extend_batch(prefixes: list[int], news: list[int]) -> ForwardBatch:
    """A prefill of `news` tokens of each sequence behind `prefixes` cached ones; token ids differ by row."""
    starts, lengths = torch.tensor(prefixes), torch.tensor(news)
    batch = _batch(ForwardMode.EXTEND, starts + lengths, int(lengths.sum()))
    batch.positions = torch.cat([torch.arange(p, p + n) for p, n in zip(prefixes, news, strict=True)])
    batch.extend_num_tokens = sum(news)
    batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = starts, prefixes
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = lengths, news
    batch.extend_start_loc = torch.cumsum(lengths, 0) - lengths
    return batch


def decode_batch(lengths: list[int]) -> ForwardBatch:
    """One decode step of sequences that are `lengths` long with the new token."""
    batch = _batch(ForwardMode.DECODE, torch.tensor(lengths), len(lengths))
    batch.positions = batch.seq_lens - 1
    return batch


def _batch(mode: ForwardMode, seq_lens: torch.Tensor, num_rows: int) -> ForwardBatch:
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(seq_lens),
        input_ids=torch.arange(num_rows) * 31 % VOCAB_SIZE,
        req_pool_indices=torch.arange(len(seq_lens)) + 40,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens.clone(),
        orig_seq_lens=seq_lens.to(torch.int32),
        out_cache_loc=torch.arange(num_rows) + 1000,
        seq_lens_sum=int(seq_lens.sum()),
    )


class ToyBackend:
    """Its plan for a batch says which rows it was made for, so that a half can check whose plan it runs under."""

    def __init__(self) -> None:
        self.forward_metadata: list[int] | None = None
        self.num_planned = 0

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.forward_metadata = batch.out_cache_loc.tolist()
        self.num_planned += 1


@dataclass(slots=True, kw_only=True)
class ToyLayer:
    """One layer's index and weight."""

    index: int
    scale: torch.Tensor


class ToyModel:
    """Layers, an embedding and a head, by the names that the runner knows of SGLang's models."""

    def __init__(self, num_layers: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
        self.layers = [ToyLayer(index=i, scale=torch.randn(HIDDEN, generator=generator)) for i in range(num_layers)]
        self.lm_head = torch.randn(HIDDEN, generator=generator)

    def logits_processor(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, lm_head: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, ForwardBatch]:
        assert len(input_ids) == len(batch.input_ids)
        return _read(hidden, batch) * lm_head, batch


def _read(hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
    """Return the rows that SGLang's head reads: of prompts the last one each."""
    if batch.forward_mode.is_decode():
        assert len(hidden) == len(batch.seq_lens)
        return hidden
    assert len(hidden) == sum(batch.extend_seq_lens_cpu) == int(batch.extend_seq_lens.sum())
    return hidden[torch.cumsum(batch.extend_seq_lens, 0) - 1]


@dataclass(slots=True)
class ToyFamily(Family):
    """Row-wise halves. `attention_rows` and `expert_rows` note, by layer, the rows of each call."""

    backend: ToyBackend
    attention_rows: dict[int, list[int]] = field(default_factory=dict)
    expert_rows: dict[int, list[int]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def embed(self, model: ToyModel, input_ids: torch.Tensor) -> torch.Tensor:
        return model.embedding[input_ids]

    def layers(self, model: ToyModel) -> list[ToyLayer]:
        return model.layers

    def attention_half(
        self,
        layer: ToyLayer,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.backend.forward_metadata == batch.out_cache_loc.tolist(), "runs under another batch's plan"
        assert (residual is None) == (layer.index == 0), "the first layer begins the residual"
        assert len(hidden) == len(positions) == len(batch.input_ids)
        self.attention_rows.setdefault(layer.index, []).append(len(hidden))
        self.order.append(f"attention {layer.index}")
        residual = hidden if residual is None else residual + hidden
        return kept_rows(rows, residual * layer.scale + positions[:, None] / 600, residual)

    def expert_half(self, layer: ToyLayer, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        self.expert_rows.setdefault(layer.index, []).append(len(hidden))
        self.order.append(f"experts {layer.index}")
        return torch.where(hidden > 0, hidden * 0.5, hidden + layer.index)

    def expert_block(self, layer: ToyLayer) -> None:
        return None

    def finish_layer(
        self, layer: ToyLayer, hidden: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.order.append(f"finish {layer.index}")
        return hidden * 0.9, residual

    def final_norm(self, model: ToyModel, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return hidden + residual


def by_hand(model: ToyModel, batch: ForwardBatch) -> torch.Tensor:
    """Return the whole model's output for the batch, computed without halves, buffers or sub-batches, with all rows."""
    hidden, residual = model.embedding[batch.input_ids], torch.zeros(len(batch.input_ids), HIDDEN)
    for layer in model.layers:
        residual = residual + hidden
        hidden = residual * layer.scale + batch.positions[:, None] / 600
        hidden = torch.where(hidden > 0, hidden * 0.5, hidden + layer.index) * 0.9
    return _read(hidden + residual, batch) * model.lm_head
