"""The loader of experts as the native library has it, typed. It decides nothing.

All calls give up Python's lock while they run. What the caller did wrong is a ValueError and has changed nothing; what
the system refuses is a RuntimeError.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

import torch

INTERFACE = 4
"""What the functions of this module take; counts up whenever that changes."""


class FourBitLayout(IntEnum):
    """How files have a matrix [outputs, inputs] of numbers of 4 bits: integers, eight in a word of 32, or mxfp4.

    ROWS: [outputs, inputs / 8], the first input lowest, scales [outputs, groups] and zero points [outputs / 8, groups].
    GPTQ: [inputs / 8, outputs], scales [groups, outputs] and zero points [groups, outputs / 8]. AWQ: [inputs,
    outputs / 8], and likewise; a word has its outputs in the order 0, 2, 4, 6, 1, 3, 5, 7.
    MXFP4: bytes [outputs, inputs / 2], the first input lower, and powers of two plus 127 as bytes [outputs,
    inputs / 32]. Gate and up are one matrix there, whose rows alternate.
    """

    ROWS = 0
    GPTQ = 1
    AWQ = 2
    MXFP4 = 3


class FourBitNumbers(NamedTuple):
    """How files have numbers of 4 bits.

    Attributes:
        layout: Where which integer lies.
        group: How many inputs share a scale and a zero point; 0 for all of an output's. Of mxfp4, 32.
        bf16_scales: Whether scales are bf16; otherwise they are float16.
        has_zeros: Whether there are zero points; otherwise all are 8.
        zero_lack: What is added to stored zero points.
    """

    layout: FourBitLayout
    group: int
    bf16_scales: bool
    has_zeros: bool
    zero_lack: int = 0


class ExpertLoader(Protocol):
    """Threads that read experts from a checkpoint and pack them into slots. Slots are int64 [N] on the CPU.

    A slot of which an expert is wanted is not asked for another until that one is there, has failed or was dropped.
    """

    def submit(self, slots: torch.Tensor, places: torch.Tensor, urgent: bool) -> None:
        """Ask for experts; `places` int64 [N, 3, 2]: file and byte of the gate, up and down matrix.

        Of bytes with scales [N, 3, 3]: and which of the stored scales is the matrix's first. Of 4 bits [N, 3, 6]: and
        file and byte of its scales, and of its zero points, which are not read where there are none. Urgent ones come
        before all others. Transposed gate and up matrices, and those of mxfp4, lie where the gate's does.
        """

    def hurry(self, slots: torch.Tensor) -> None:
        """Let what is already asked for come before what is not urgent."""

    def drop(self, slots: torch.Tensor) -> torch.Tensor:
        """Leave out what has not begun; True for each slot that is empty now."""

    def wait(self, slots: torch.Tensor) -> None:
        """Return when these slots are filled; RuntimeError with what went wrong in one of them."""

    def direct(self) -> bool:
        """Whether all files are read past the page cache."""

    def close(self) -> None:
        """End the threads; what they have begun they end."""

    def totals(self) -> list[int]:
        """Bytes and experts loaded, experts dropped, errors; then nanoseconds: reading, packing, waited for."""


def start_expert_loader(
    files: list[str],
    *,
    direct: bool,
    keeps_cached: bool = False,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scales: torch.Tensor | None,
    w2_scales: torch.Tensor | None,
    stored: torch.dtype,
    transposed: bool = False,
    num_threads: int,
    stored_scales: torch.Tensor | None = None,
    block: tuple[int, int] = (0, 0),
    four_bits: FourBitNumbers | None = None,
) -> ExpertLoader:
    """Start a loader into `w13` [S, 2I, M] and `w2` [S, M, I], packed as for `experts`.

    `stored`: the number type of the files, bf16 or float32. Slots have the same, or int8 with their scales [S, 2I] and
    [S, M]. `transposed`: the files have a row for each input, gate and up in one matrix [M, 2I] whose columns
    alternate, and down [I, M]; for int8, each thread then takes memory for the gate and up of one expert. `direct`:
    read past the page cache where the file system allows it; otherwise the cache is released behind, unless
    `keeps_cached`. The caller keeps the tensors alive until the loader is closed.

    Slots of fp8 and int8 are those that `pack_fp8_` and `pack_int8_groups_` fill, and files then have rows of
    float8_e4m3fn or int8: `stored` is not read.
    `stored_scales`: float32, those of all matrices one after the other. `block`: how many rows and columns of a matrix
    share one, all for 0; columns in whole groups of the slots. Slots of 4 bits are those that `pack_int4_` or
    `pack_fp4_` fills, and files then have `four_bits`.
    """
    loader: ExpertLoader = torch.classes.sgl_batch_kernel.ExpertLoader(
        files,
        direct,
        keeps_cached,
        w13,
        w2,
        w13_scales,
        w2_scales,
        stored == torch.float32,
        transposed,
        num_threads,
        stored_scales,
        *block,
        [] if four_bits is None else list(four_bits),
    )
    return loader
