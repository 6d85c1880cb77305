"""Owns what the native attention kernels are told of a batch: its pieces and their pages. Prefill and decode are one.

Shape suffixes: B pieces (sequences of a sub-batch), P pages of all pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceMetadata:
    """Rows of each piece [B + 1], tokens of its sequence so far [B], and where its pages begin in `tables` [B]."""

    starts: torch.Tensor
    lengths: torch.Tensor
    table_starts: torch.Tensor
    tables: torch.Tensor


def pieces_of(forward_batch: Any, req_to_token: torch.Tensor, page_size: int, first_page: int) -> PieceMetadata:
    """The pieces of a sub-batch: one row each in decode, the new tokens of each sequence in prefill.

    Pages are counted from `first_page`.
    """
    lengths_B = forward_batch.seq_lens.to(torch.int64)
    if forward_batch.forward_mode.is_decode():
        starts = torch.arange(len(lengths_B) + 1)
    else:
        new = torch.tensor([0, *forward_batch.extend_seq_lens_cpu])
        starts = torch.cumsum(new, 0)
        lengths_B = torch.tensor(forward_batch.extend_prefix_lens_cpu) + new[1:]
    num_pages_B = (lengths_B + page_size - 1) // page_size
    table_starts_B = torch.cumsum(num_pages_B, 0) - num_pages_B
    owner_P = torch.repeat_interleave(torch.arange(len(lengths_B)), num_pages_B)
    rank_P = torch.arange(len(owner_P)) - table_starts_B[owner_P]
    slots_P = req_to_token[forward_batch.req_pool_indices[owner_P], rank_P * page_size].to(torch.int64)
    return PieceMetadata(
        starts=starts, lengths=lengths_B, table_starts=table_starts_B, tables=slots_P // page_size - first_page
    )


def attend(
    kernels: ModuleType,
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    pieces: PieceMetadata,
    *,
    page_size: int,
    head_dim: int,
    scaling: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of q [rows, heads * head_dim] over the pages of its pieces; the same shape and number type.

    A row sees the last `window` tokens up to its own, or all with 0. `sinks`: [heads].
    """
    out: torch.Tensor = kernels.attention(
        q,
        *pools,
        starts=pieces.starts,
        lengths=pieces.lengths,
        table_starts=pieces.table_starts,
        tables=pieces.tables,
        page_size=page_size,
        head_dim=head_dim,
        scaling=scaling,
        window=window,
        sinks=None if sinks is None else sinks.detach().float().contiguous(),
    )
    return out


def attend_latent(
    kernels: ModuleType,
    q: torch.Tensor,
    pages: torch.Tensor,
    pieces: PieceMetadata,
    *,
    value_dim: int,
    scaling: float,
) -> torch.Tensor:
    """Causal attention of q [rows, heads * row] over pages of rows that all heads share: [rows, heads * value_dim]."""
    out: torch.Tensor = kernels.latent_attention(
        q,
        pages,
        starts=pieces.starts,
        lengths=pieces.lengths,
        table_starts=pieces.table_starts,
        tables=pieces.tables,
        value_dim=value_dim,
        scaling=scaling,
    )
    return out
