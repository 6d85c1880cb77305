"""Measures yielding and combining in a forward pass: a group's rows, written and read at module boundaries."""

from __future__ import annotations

import torch

from primitive_costs.timing import Cost, sample
from sgl_batch.core.plan import row_spans
from sgl_batch.model_executor.accumulation_buffer import AccumulationBuffer

_REPEATS = 20


def measure(*, batch: int, b_attn: int, hidden: int, layers: int, device: str, rounds: int) -> list[Cost]:
    """Measure what accumulation adds to each layer of a pass over `batch` rows of `hidden` channels in bfloat16."""
    buffer = AccumulationBuffer(batch)
    yielded = torch.ones(batch, hidden, dtype=torch.bfloat16, device=device)
    spans = row_spans(batch, b_attn)

    def write() -> None:
        for start, end in spans:
            buffer.put((start, end), yielded[start:end], yielded[start:end])

    def combine() -> None:
        buffer.take(batch)

    def write_and_combine() -> None:
        write()
        combine()

    mib = 2 * yielded.nbytes / 2**20
    costs = [
        Cost(
            category="yield, within a pass",
            operation=f"hidden states and residuals ({mib:.1f} MiB) to the buffer, by {len(spans)} sub-batches",
            unit=f"{batch} sequences, a layer",
            samples_s=sample(write_and_combine, rounds=rounds, device=device, repeats=_REPEATS),
            per_step=float(layers),
        )
    ]
    combined = sample(combine, rounds=rounds, device=device, prepare=write)
    return [
        *costs,
        Cost(
            category="combine, without KV",
            operation="the buffer's rows as one group",
            unit=f"{batch} sequences, a layer",
            samples_s=combined,
            per_step=float(layers),
        ),
    ]
