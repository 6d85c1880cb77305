"""Owns the arguments of the native attention kernels: the pieces of a batch and their pages, in prefill and decode.

Shape suffixes: B pieces (sequences of a sub-batch), P pages of all pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceMetadata:
    """First row of each piece [B + 1], tokens of its sequence so far [B], and its first index in `tables` [B].

    `tables`: the pages of all pieces [P], one piece after the other.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    table_starts: torch.Tensor
    tables: torch.Tensor


def pieces_of(forward_batch: Any, req_to_token: torch.Tensor, page_size: int, first_page: int) -> PieceMetadata:
    """Return the pieces of a sub-batch: one row each in decode, the new tokens of each sequence in prefill.

    Page 0 is the pool's page `first_page`.
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
    first_kv_index_P = req_to_token[forward_batch.req_pool_indices[owner_P], rank_P * page_size].to(torch.int64)
    tables_P = first_kv_index_P // page_size - first_page
    return PieceMetadata(starts=starts, lengths=lengths_B, table_starts=table_starts_B, tables=tables_P)


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
    """Attend causally with q [rows, heads * head_dim] to the pages of its pieces; the result has q's form.

    A row attends to the last `window` tokens up to its own; 0 is all. `sinks`: [heads].
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
    """Attend causally with q [rows, heads * row] to pages of rows that all heads share: [rows, heads * value_dim]."""
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
