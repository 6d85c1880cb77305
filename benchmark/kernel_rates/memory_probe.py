"""Owns the measured limits of memory that no operator of torch shows: reads of pages in random order, and lines that
cores hand to each other. Its program is compiled when it is needed.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from kernel_rates.work import Work
from sgl_batch.errors import ConfigError
from sgl_batch.mem_cache.device_page_pool import lazy_zeros

PAGE_READ, EXCHANGE = "page read", "exchange of a line"
# There and back, in one call.
EXCHANGES = 200_000
_SOURCE = Path(__file__).with_suffix(".cpp")
# Every how manieth line of the next run is asked for early.
_WAYS = {"each line asked for early": 1, "one line of two asked for early": 2, "none asked for early": 0}


@cache
def _program() -> ctypes.CDLL:
    """Compile and load the program. Raises ConfigError without a C++ compiler."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = ("-std=c++20", "-O3", "-march=native", "-pthread", "-shared", "-fPIC")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "memory_probe.so"
        try:
            subprocess.run([*compiler, *flags, str(_SOURCE), "-o", str(library)], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", None) or str(error).encode()).decode(errors="replace").strip()
            raise ConfigError(
                f"{compiler[0]} does not compile {_SOURCE.name}: {reason}; install a C++ compiler, or name yours in CXX"
            ) from error
        return ctypes.CDLL(str(library))


def page_reads(page_bytes: int, num_bytes: int) -> Iterator[Work]:
    """Return reads of so many bytes in pages in a random order, on all of torch's threads, in several ways.

    That is what attention has to read, by a program that does nothing else: the fastest way is its limit.
    """
    program, num_pages = _program(), num_bytes // page_bytes
    pages, order = lazy_zeros((num_pages, page_bytes), torch.uint8).fill_(1), torch.randperm(num_pages)
    for by, ask in _WAYS.items():
        arguments = (
            ctypes.c_void_p(pages.data_ptr()),
            ctypes.c_void_p(order.data_ptr()),
            *map(ctypes.c_int64, (num_pages, page_bytes, ask)),
            torch.get_num_threads(),
        )
        yield Work(
            table=PAGE_READ,
            row=f"pages of {page_bytes >> 10} KiB in random order",
            by=by,
            flops=0,
            num_bytes=num_pages * page_bytes,
            run=lambda arguments=arguments, kept=(pages, order): program.read_runs(*arguments),
        )


def line_exchange() -> Iterator[Work]:
    """Return two cores that hand a line to each other; nothing where there is one core.

    Cores that share no L3 cache take several times as long. A virtual machine's may be moved while it runs.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return
    program, times = _program(), ctypes.c_int64(EXCHANGES)
    row = f"a cache line between cores {cores[0]} and {cores[1]}"
    yield Work(
        table=EXCHANGE,
        row=row,
        by="two threads",
        flops=0,
        num_bytes=0,
        run=lambda: program.exchange_line(cores[0], cores[1], times),
    )
