"""Owns how the checks that are written in C++ are compiled and run: with the kernels' own sources and headers."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "sgl-kernel" / "csrc" / "cpu"


def compiled(directory: Path, name: str, *sources: Path, flags: tuple[str, ...] = ()) -> Path:
    """Compile the program of checks of this name, beside further sources, optimised as kernels are."""
    program = directory / name
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    usual = ("-std=c++20", "-O3", "-pthread", f"-I{KERNELS}", "-o", str(program))
    files = (HERE / f"{name}.cpp", *sources)
    subprocess.run([*compiler, *usual, *flags, *map(str, files)], check=True, timeout=300)
    return program


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run such a program, and return how it ended and what it said."""
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=300, check=False)
