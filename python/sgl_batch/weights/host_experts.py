"""Owns the experts of a checkpoint in host memory, from which they are copied to a GPU."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from sgl_batch.errors import ConfigError
from sgl_batch.weights.expert_checkpoint import ExpertLocations


@dataclass(frozen=True, slots=True, kw_only=True)
class HostExperts:
    """`w13` [L, E, 2I, M] and `w2` [L, E, M, I]. Gate lies above up; rows of transposed experts alternate."""

    w13: torch.Tensor
    w2: torch.Tensor

    @property
    def expert_bytes(self) -> int:
        return self.w13[0, 0].nbytes + self.w2[0, 0].nbytes


def read_experts(locations: ExpertLocations, num_threads: int) -> HostExperts:
    """Read all experts. Raises ConfigError that names a file that cannot be read, or is too short."""
    layers, experts = locations.file_offsets.shape[:2]
    inter, hidden = locations.inter, locations.hidden
    w13 = torch.empty(layers, experts, 2 * inter, hidden, dtype=locations.dtype)
    w2 = torch.empty(layers, experts, hidden, inter, dtype=locations.dtype)
    with ExitStack() as opened:
        descriptors = [_open(file) for file in locations.files]
        for descriptor in descriptors:
            opened.callback(os.close, descriptor)

        def read(one: tuple[int, int]) -> None:
            layer, expert = one
            gate_up, down = w13[layer, expert], w2[layer, expert]
            gate, up, last = locations.file_offsets[layer, expert].tolist()
            parts = [(gate_up[:inter], gate), (gate_up[inter:], up), (down, last)]
            if locations.transposed:
                parts = [(gate_up.t(), gate), (down.t(), last)]
            for part, (file, offset) in parts:
                stored = part if part.is_contiguous() else torch.empty(part.shape, dtype=part.dtype)
                _fill(stored, descriptors[file], offset, locations.files[file])
                if stored is not part:
                    part.copy_(stored)

        with ThreadPoolExecutor(num_threads, thread_name_prefix="sgl-weights") as pool:
            for _ in pool.map(read, ((layer, expert) for layer in range(layers) for expert in range(experts))):
                pass
    return HostExperts(w13=w13, w2=w2)


def _open(file: str) -> int:
    try:
        return os.open(file, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error


def _fill(part: torch.Tensor, descriptor: int, offset: int, file: str) -> None:
    view: Any = memoryview(part.view(torch.uint8).flatten().numpy())  # type: ignore[arg-type]
    done = 0
    while done < len(view):
        try:
            got = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
        if got == 0:
            raise ConfigError(f"{file} ends {len(view) - done} bytes too soon: the file is not whole; fetch it again")
        done += got
