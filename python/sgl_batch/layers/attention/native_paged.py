"""Owns the arguments of the native attention kernels: the pieces of a batch and their pages, in prefill and decode.

Of the ranks of a set, each attends with some query heads. Shape suffixes: B pieces (sequences of a sub-batch), P pages
of all pieces, T rows, U units (query heads of one KV head that are attended to together).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceMetadata:
    """First row of each piece [B + 1], tokens of its sequence so far [B], and its first index in `tables` [B].

    `tables`: the pages of all pieces [P], one piece after the other. `visits`: rows times tokens, summed over pieces.
    `by_heads`: what `of_kv_heads` has made, by heads; a pool has one number of KV heads. `rows`: the rows of the
    sub-batch that the pieces have, which are all that attend; None for all of its rows.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    table_starts: torch.Tensor
    tables: torch.Tensor
    visits: int
    rows: torch.Tensor | None = None
    by_heads: dict[tuple[int, ...], PieceMetadata] = field(default_factory=dict)

    def of_kv_heads(self, heads: tuple[int, ...], num_kv_heads: int) -> PieceMetadata:
        """Return the pieces for the rows of each of these KV heads, one head after the other.

        Their pages hold one KV head: page p and head h of the pool are page `p * num_kv_heads + h`. All layers of a
        pass ask for the same, which is made once.
        """
        found = self.by_heads.get(heads)
        if found is None:
            units, rows, pages = len(heads), int(self.starts[-1]), len(self.tables)
            numbers_U1 = torch.arange(units)[:, None]
            found = self.by_heads[heads] = PieceMetadata(
                starts=torch.cat(((numbers_U1 * rows + self.starts[:-1]).flatten(), torch.tensor([units * rows]))),
                lengths=self.lengths.repeat(units),
                table_starts=(numbers_U1 * pages + self.table_starts).flatten(),
                tables=(self.tables * num_kv_heads + torch.tensor(heads)[:, None]).flatten(),
                visits=units * self.visits,
            )
        return found

    def of_last_rows(self, counts: Sequence[int], rows: torch.Tensor) -> PieceMetadata:
        """Return the pieces with so many of their last rows each, `rows` in all; those with none are left out."""
        counts_B = torch.tensor(counts)
        has_B = counts_B > 0
        return PieceMetadata(
            starts=torch.cumsum(torch.cat((torch.zeros(1, dtype=torch.int64), counts_B[has_B])), 0),
            lengths=self.lengths[has_B],
            table_starts=self.table_starts[has_B],
            tables=self.tables,
            visits=int((counts_B * self.lengths).sum()),
            rows=rows,
        )


def pieces_of(forward_batch: Any, req_to_token: torch.Tensor, page_size: int, first_page: int) -> PieceMetadata:
    """Return the pieces of a sub-batch: one row each in decode, the new tokens of each sequence in prefill.

    Page 0 is the pool's page `first_page`.
    """
    lengths_B = forward_batch.seq_lens.to(torch.int64)
    if forward_batch.forward_mode.is_decode():
        starts = torch.arange(len(lengths_B) + 1)
        visits = int(lengths_B.sum())
    else:
        new = torch.tensor([0, *forward_batch.extend_seq_lens_cpu])
        starts = torch.cumsum(new, 0)
        lengths_B = torch.tensor(forward_batch.extend_prefix_lens_cpu) + new[1:]
        visits = int((new[1:] * lengths_B).sum())
    num_pages_B = (lengths_B + page_size - 1) // page_size
    table_starts_B = torch.cumsum(num_pages_B, 0) - num_pages_B
    owner_P = torch.repeat_interleave(torch.arange(len(lengths_B)), num_pages_B)
    rank_P = torch.arange(len(owner_P)) - table_starts_B[owner_P]
    first_kv_index_P = req_to_token[forward_batch.req_pool_indices[owner_P], rank_P * page_size].to(torch.int64)
    tables_P = first_kv_index_P // page_size - first_page
    return PieceMetadata(starts=starts, lengths=lengths_B, table_starts=table_starts_B, tables=tables_P, visits=visits)


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


def attend_heads(
    kernels: ModuleType,
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    pieces: PieceMetadata,
    *,
    heads: tuple[int, int],
    page_size: int,
    head_dim: int,
    scaling: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend as `attend` does, with the query heads [first, last) of q alone: [rows, (last - first) * head_dim].

    Where they are all those of some KV heads, one call reads these in the pages. They need not be: several ranks may
    read one KV head. With sinks each unit is then a call of its own, because its query heads have their own sinks.
    """
    (first, last), rows = heads, len(q)
    if first == last:
        return q.new_empty(rows, 0)
    num_kv_heads = pools[0].shape[1]
    group = q.shape[1] // head_dim // num_kv_heads
    if first % group == last % group == 0:
        keys, values = (pool[:, first // group : last // group] for pool in pools)
        return attend(
            kernels,
            q[:, first * head_dim : last * head_dim],
            (keys, values),
            pieces,
            page_size=page_size,
            head_dim=head_dim,
            scaling=scaling,
            window=window,
            sinks=None if sinks is None else sinks[first:last],
        )
    unit = gcd(group, first, last)
    by_kv_head = tuple(pool.flatten(0, 1)[:, None] for pool in pools)
    q_UTD = q[:, first * head_dim : last * head_dim].view(rows, -1, unit * head_dim).transpose(0, 1)
    kv_heads = tuple(head // group for head in range(first, last, unit))
    each = 1 if sinks is not None else len(q_UTD)
    parts = [
        attend(
            kernels,
            q_UTD[at : at + each].reshape(each * rows, -1),
            (by_kv_head[0], by_kv_head[1]),
            pieces.of_kv_heads(kv_heads[at : at + each], num_kv_heads),
            page_size=page_size,
            head_dim=head_dim,
            scaling=scaling,
            window=window,
            sinks=None if sinks is None else sinks[first + at * unit : first + (at + 1) * unit],
        ).view(each, rows, -1)
        for at in range(0, len(q_UTD), each)
    ]
    return torch.cat(parts).transpose(0, 1).reshape(rows, -1)


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
