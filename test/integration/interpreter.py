"""SGLang's Triton attention on a CPU: what an engine is given for it, and Triton's interpreter, which is slow."""

from __future__ import annotations

import pytest

# Each part of a sequence's KV takes the interpreter as long as a whole short one.
TRITON = {"attention_backend": "triton", "triton_attention_num_kv_splits": 2}

# What a process runs Triton's kernels in its interpreter with.
INTERPRETED = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem", "PYTHONWARNINGS": "ignore"}


def interpret_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are started from now on run Triton's kernels in its interpreter."""
    for name, value in INTERPRETED.items():
        monkeypatch.setenv(name, value)
