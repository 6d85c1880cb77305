"""Owns the order of keys and values within a page of one layer. The pool owns the pages.

Shape suffixes: P pages, N tokens, H KV heads, S tokens of a page, D head dimension; W and C below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_batch.kernel_loader import native_kernels

PANEL = 32  # columns of a packed panel of the native kernels


class PageLayout(Protocol):
    """How a page stores its tokens. A token is given by its KV index: page * page size + offset, int64 [N]."""

    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]

    def write(
        self,
        pools: tuple[torch.Tensor, torch.Tensor],
        kv_indices: torch.Tensor,
        keys_NHD: torch.Tensor,
        values_NHD: torch.Tensor,
    ) -> None:
        """Write keys and values at KV indices of the two pools [P, *shape]."""
        ...

    def read(
        self, pools: tuple[torch.Tensor, torch.Tensor], kv_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values [N, H, D] at KV indices."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLayout:
    """[H, S, D]: the page of one head is a contiguous matrix, for torch operators."""

    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]

    def write(
        self,
        pools: tuple[torch.Tensor, torch.Tensor],
        kv_indices: torch.Tensor,
        keys_NHD: torch.Tensor,
        values_NHD: torch.Tensor,
    ) -> None:
        pages, offsets = _places(kv_indices, self.key_shape[1])
        pools[0][pages, :, offsets] = keys_NHD
        pools[1][pages, :, offsets] = values_NHD

    def read(
        self, pools: tuple[torch.Tensor, torch.Tensor], kv_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pages, offsets = _places(kv_indices, self.key_shape[1])
        return pools[0][pages, :, offsets], pools[1][pages, :, offsets]


@dataclass(frozen=True, slots=True)
class PanelLayout:
    """Keys [H, S/W, D/C, W, C] and values [H, D/W, S/C, W, C]: packed for the native kernels.

    W is at most `PANEL` columns, tokens for keys and channels for values; C is 2 for bf16, whose pairs the kernels
    multiply together, and 1 for float32.
    """

    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]

    def write(
        self,
        pools: tuple[torch.Tensor, torch.Tensor],
        kv_indices: torch.Tensor,
        keys_NHD: torch.Tensor,
        values_NHD: torch.Tensor,
    ) -> None:
        kernels = native_kernels()
        assert kernels is not None, "packed pages need the native kernels"
        kernels.write_pages(*pools, kv_indices, _with_heads_together(keys_NHD), _with_heads_together(values_NHD))

    def read(
        self, pools: tuple[torch.Tensor, torch.Tensor], kv_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pages, offsets = _places(kv_indices, self.key_shape[1] * self.key_shape[3])
        (key_panel, key_column), (pair, half) = self._coordinates(offsets)
        return (
            pools[0][pages, :, key_panel, :, key_column].flatten(2),
            pools[1][pages, :, :, pair, :, half].flatten(2),
        )

    def _coordinates(
        self, offsets: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        width, step = self.key_shape[3], self.value_shape[4]
        return (offsets // width, offsets % width), (offsets // step, offsets % step)


def _places(kv_indices: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the page and the offset of each KV index."""
    return kv_indices // page_size, kv_indices % page_size


def _with_heads_together(rows_NHD: torch.Tensor) -> torch.Tensor:
    """Return rows as the kernels take them: all heads of a token contiguous; tokens may lie apart."""
    together = rows_NHD.stride()[1:] == (rows_NHD.shape[2], 1)
    return rows_NHD if together else rows_NHD.contiguous()


def page_layout(
    *, heads: int, page_size: int, head_dim: int, dtype: torch.dtype, native: bool
) -> PlainLayout | PanelLayout:
    """Return the native kernels' layout if `native` and if its panels fit the sizes, otherwise the plain one."""
    step = 2 if dtype == torch.bfloat16 else 1
    fits = all(size % step == 0 and (size < PANEL or size % PANEL == 0) for size in (page_size, head_dim))
    if not (native and fits and dtype in (torch.bfloat16, torch.float32)):
        shape = (heads, page_size, head_dim)
        return PlainLayout(shape, shape)
    tokens, channels = min(page_size, PANEL), min(head_dim, PANEL)
    return PanelLayout(
        (heads, page_size // tokens, head_dim // step, tokens, step),
        (heads, head_dim // channels, page_size // step, channels, step),
    )
