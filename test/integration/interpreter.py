"""Owns the settings that run SGLang's Triton attention on a CPU, under Triton's interpreter, which is slow."""

from __future__ import annotations

import pytest

# Few splits: for each the interpreter takes as long as for a whole short sequence.
TRITON = {"attention_backend": "triton", "triton_attention_num_kv_splits": 2}

# Environment of a process that runs Triton's kernels in the interpreter.
INTERPRETED = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem", "PYTHONWARNINGS": "ignore"}


def interpret_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines that start from now on run Triton's kernels in the interpreter."""
    for name, value in INTERPRETED.items():
        monkeypatch.setenv(name, value)
