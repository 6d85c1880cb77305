"""Owns the files of experts and the expert slots that the tests of the loader use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sgl_batch_kernel import pack_
from sgl_batch_kernel.expert_loader import start_expert_loader

from sgl_batch.layers.moe.clamped_experts import alternating


def _rounded(weight_BNK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in int8 and the scales of its outputs [B, N], by the definition."""
    exact = weight_BNK.float()
    scales = exact.abs().amax(-1) / 127
    scales[scales == 0] = 1.0
    return (exact / scales[..., None]).round().clamp(-127, 127).to(torch.int8), scales


@dataclass(frozen=True, slots=True)
class Stored:
    """Experts in files: `file_offsets` [E, 3, 2] of gate, up and down as (file, byte), and their matrices.

    w13 is [E, 2I, M] and w2 [E, M, I], unpacked. `transposed`: gate and up lie in one matrix [M, 2I] whose columns
    alternate, and down as [I, M].
    """

    files: list[str]
    file_offsets: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    transposed: bool = False

    @classmethod
    def random(
        cls,
        folder: Path,
        *,
        experts: int,
        inter: int,
        hidden: int,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        transposed: bool = False,
    ) -> Stored:
        """Write two files of matrices in random order with odd gaps between them; each file ends with a matrix."""
        generator = torch.Generator().manual_seed(seed)
        w13 = torch.randn(experts, 2 * inter, hidden, generator=generator).to(dtype)
        w2 = torch.randn(experts, hidden, inter, generator=generator).to(dtype)
        file_offsets = torch.empty(experts, 3, 2, dtype=torch.int64)
        files = [folder / f"experts-{number}.bin" for number in range(2)]
        contents = [bytearray(), bytearray()]
        for index in torch.randperm(3 * experts, generator=generator).tolist():
            expert, part = divmod(index, 3)
            if transposed and part == 1:
                continue
            file = int(torch.randint(2, (), generator=generator))
            contents[file] += bytes(int(torch.randint(0, 10_000, (), generator=generator)))
            file_offsets[expert, part] = torch.tensor([file, len(contents[file])])
            matrix = w2[expert] if part == 2 else w13[expert].view(2, inter, hidden)[part]
            if transposed:
                matrix = (matrix if part == 2 else alternating(w13[expert][None])[0]).t()
            contents[file] += matrix.contiguous().view(torch.uint8).numpy().tobytes()
        if transposed:
            file_offsets[:, 1] = file_offsets[:, 0] + torch.tensor([0, dtype.itemsize])
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        return cls([str(file) for file in files], file_offsets, w13, w2, transposed)

    @property
    def expert_bytes(self) -> int:
        return (self.w13[0].numel() + self.w2[0].numel()) * self.w13.dtype.itemsize

    def last_in_file(self, file: int) -> int:
        """Return the expert whose matrix is the last in a file."""
        offsets = torch.where(self.file_offsets[..., 0] == file, self.file_offsets[..., 1], -1)
        return int(offsets.flatten().argmax()) // 3


@dataclass(frozen=True, slots=True)
class Packed:
    """Expert slots: packed gate and up, packed down, and for int8 their scales."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scales: torch.Tensor | None = None
    w2_scales: torch.Tensor | None = None

    @classmethod
    def of(cls, stored: Stored, dtype: torch.dtype) -> Packed:
        """Return slots with each expert in the slot of its id, packed by the operators for resident weights."""
        (w13, w13_scales), (w2, w2_scales) = (
            _rounded(plain) if dtype == torch.int8 else (plain.clone(), None) for plain in (stored.w13, stored.w2)
        )
        experts, hidden, inter = w2.shape
        pack_(w13.view(2 * experts, inter, hidden))
        pack_(w2)
        return cls(w13, w2, w13_scales, w2_scales)

    @classmethod
    def empty(cls, slots: int, stored: Stored, dtype: torch.dtype) -> Packed:
        """Return slots in which every byte is 7."""
        w13, w2 = (
            torch.full((slots, plain[0].numel() * dtype.itemsize), 7, dtype=torch.uint8)
            .view(dtype)
            .view(slots, *plain.shape[1:])
            for plain in (stored.w13, stored.w2)
        )
        if dtype != torch.int8:
            return cls(w13, w2)
        return cls(w13, w2, torch.full(w13.shape[:2], 7.0), torch.full(w2.shape[:2], 7.0))

    def slot(self, number: int) -> list[torch.Tensor]:
        """Return all tensors of one slot, as bytes."""
        tensors = (self.w13, self.w2, self.w13_scales, self.w2_scales)
        return [tensor[number].contiguous().view(torch.uint8) for tensor in tensors if tensor is not None]

    def equals(self, slot: int, other: Packed, of: int) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.slot(slot), other.slot(of), strict=True))


@dataclass(frozen=True, slots=True)
class Loading:
    """A loader of experts into slots, and the expected contents of slots."""

    stored: Stored
    slots: Packed
    expected: Packed
    loader: Any

    @classmethod
    def start(
        cls, stored: Stored, *, slots: int, dtype: torch.dtype | None = None, direct: bool = True, threads: int = 2
    ) -> Loading:
        dtype = dtype or stored.w13.dtype
        made = Packed.empty(slots, stored, dtype)
        loader = start_expert_loader(
            stored.files,
            direct=direct,
            w13=made.w13,
            w2=made.w2,
            w13_scales=made.w13_scales,
            w2_scales=made.w2_scales,
            stored=stored.w13.dtype,
            transposed=stored.transposed,
            num_threads=threads,
        )
        return cls(stored, made, Packed.of(stored, dtype), loader)

    def ask(self, slots: Sequence[int], experts: Sequence[int], *, urgent: bool = True) -> None:
        self.loader.submit(torch.tensor(slots), self.stored.file_offsets[torch.tensor(experts)].contiguous(), urgent)

    def wait(self, *slots: int) -> None:
        self.loader.wait(torch.tensor(slots, dtype=torch.int64))

    def drop(self, *slots: int) -> list[bool]:
        return list(self.loader.drop(torch.tensor(slots, dtype=torch.int64)).tolist())

    def hurry(self, *slots: int) -> None:
        self.loader.hurry(torch.tensor(slots, dtype=torch.int64))

    def holds(self, slot: int, expert: int) -> bool:
        return self.slots.equals(slot, self.expected, expert)

    def untouched(self, slot: int) -> bool:
        return all(bool((part == 7).all()) for part in (self.slots.w13[slot].view(torch.uint8),))
