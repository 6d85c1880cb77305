"""The loader of experts as the native library has it, typed. It decides nothing.

All calls give up Python's lock while they run. What the caller did wrong is a ValueError and has changed nothing; what
the system refuses is a RuntimeError.
"""

from __future__ import annotations

from typing import Protocol

import torch

INTERFACE = 3
"""What the functions of this module take; counts up whenever that changes."""


class ExpertLoader(Protocol):
    """Threads that read experts from a checkpoint and pack them into slots. Slots are int64 [N] on the CPU.

    A slot of which an expert is wanted is not asked for another until that one is there, has failed or was dropped.
    """

    def submit(self, slots: torch.Tensor, places: torch.Tensor, urgent: bool) -> None:
        """Ask for experts; `places` int64 [N, 3, 2]: file and byte of the gate, up and down matrix.

        Of fp8 [N, 3, 3]: and which of the stored scales is the matrix's first.
        Urgent ones come before all others. Transposed gate and up matrices lie where the gate's does.
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
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_scales: torch.Tensor | None,
    w2_scales: torch.Tensor | None,
    stored: torch.dtype,
    transposed: bool = False,
    num_threads: int,
    stored_scales: torch.Tensor | None = None,
    block: tuple[int, int] = (0, 0),
) -> ExpertLoader:
    """Start a loader into `w13` [S, 2I, M] and `w2` [S, M, I], packed as for `experts`.

    `stored`: the number type of the files, bf16 or float32. Slots have the same, or int8 with their scales [S, 2I] and
    [S, M]. `transposed`: the files have a row for each input, gate and up in one matrix [M, 2I] whose columns
    alternate, and down [I, M]; for int8, each thread then takes memory for the gate and up of one expert. `direct`:
    read past the page cache where the file system allows it; otherwise the cache is released behind. The caller keeps
    the tensors alive until the loader is closed.

    Slots of fp8 are those that `pack_fp8_` fills, and files then have its codes, float8_e4m3fn: `stored` is not read.
    `stored_scales`: float32, those of all matrices one after the other. `block`: how many rows and columns of a matrix
    share one, all for 0; columns in whole groups of the slots.
    """
    loader: ExpertLoader = torch.classes.sgl_batch_kernel.ExpertLoader(
        files,
        direct,
        w13,
        w2,
        w13_scales,
        w2_scales,
        stored == torch.float32,
        transposed,
        num_threads,
        stored_scales,
        *block,
    )
    return loader
