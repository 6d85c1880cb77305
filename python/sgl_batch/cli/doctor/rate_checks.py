"""Owns the doctor's measurements of memory copies and disk reads. Each takes about a second."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.cli.doctor.machine import Machine
from sgl_batch.cli.doctor.rows import Row, State
from sgl_batch.weights.disk_rate import disk_rate

_COPY_BYTES = 256 << 20
_ROUNDS = 3
_DISK_BYTES = 64 << 20
_DISK_THREADS = 4
_SLOW_DISK = 200e6


def copies(machine: Machine, *, num_bytes: int = _COPY_BYTES) -> Sequence[Row]:
    """Measure copies between host and GPU memory in both directions; without a GPU, within memory."""
    torch = machine.load("torch")
    on_gpu = bool(torch.cuda.is_available())
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
    other = torch.empty_like(host, device="cuda" if on_gpu else "cpu", pin_memory=False)
    finish: Callable[[], object] = torch.cuda.synchronize if on_gpu else (lambda: None)
    ways = {"host to device": (host, other), "device to host": (other, host)} if on_gpu else {"memory": (host, other)}
    rates = {name: _rate(source, target, finish) for name, (source, target) in ways.items()}
    return [
        Row(
            check="copies",
            state=State.OK,
            found=", ".join(f"{name} {_shown(rate)}" for name, rate in rates.items()),
            values={f"{name.replace(' ', '_')}_bytes_per_s": rate for name, rate in rates.items()},
        )
    ]


def _rate(source: Any, target: Any, finish: Callable[[], object]) -> float:
    """Return the bytes per second of the fastest of some copies. The first does not count: it touches new memory."""
    best = 0.0
    for number in range(_ROUNDS + 1):
        finish()
        begun = time.perf_counter()
        target.copy_(source, non_blocking=True)
        finish()
        if number:
            best = max(best, source.nbytes / (time.perf_counter() - begun))
    return best


def disk(machine: Machine, *, num_bytes: int = _DISK_BYTES) -> Sequence[Row]:
    """Measure reads past the page cache: of the model's files, or else of a temporary file."""
    weights = [] if machine.model is None else sorted(machine.model.glob("*.safetensors"))
    if sum(file.stat().st_size for file in weights) > num_bytes:
        return [_disk_row(weights, f"of {machine.model}", num_bytes)]
    with tempfile.NamedTemporaryFile(prefix="sgl-batch-doctor-") as file:
        piece = bytes(1 << 20)
        for _ in range(num_bytes >> 20):
            file.write(piece)
        file.flush()
        try:
            return [_disk_row([Path(file.name)], f"of a temporary file in {Path(file.name).parent}", num_bytes)]
        except OSError as error:
            return [
                Row(
                    check="disk",
                    state=State.WARNING,
                    found=f"{Path(file.name).parent} does not allow direct reads: {error}",
                )
            ]


def _disk_row(files: list[Path], what: str, num_bytes: int) -> Row:
    rate = disk_rate(files, threads=_DISK_THREADS, most_bytes=num_bytes)
    slow = rate < _SLOW_DISK
    return Row(
        check="disk",
        state=State.WARNING if slow else State.OK,
        found=f"{_shown(rate)}, direct reads {what} by {_DISK_THREADS} threads",
        remedy="--weights streamed and --kv-store-dir will be slow with this disk" if slow else "",
        values={"read_bytes_per_s": rate},
    )


def _shown(rate: float) -> str:
    return f"{format_bytes(rate)}/s"
