"""Every expert runner that this machine can run keeps its guarantees in the same suite.

On a CPU: the native kernels under each instruction set, torch, our Triton kernels under Triton's interpreter, and the
runner for DeepGEMM over a stand-in for its GEMM. On a GPU: Triton, torch, SGLang's, and DeepGEMM where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_batch.kernel_loader import native_kernels

CASES = Path(__file__).with_name("expert_cases.py")
# The interpreter multiplies with numpy's BLAS. Its kernels for some processors give a row other bits at other indices.
INTERPRETED = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem", "CUDA_VISIBLE_DEVICES": ""}


def runners() -> Iterator[Any]:
    """Yield runner, device and environment of each run."""
    kernels = native_kernels()
    for isa in kernels.runnable_isas() if kernels else ():
        yield pytest.param("native", "cpu", {"SGL_BATCH_ISA": isa}, id=f"native-{isa}")
    yield pytest.param("torch", "cpu", {}, id="torch")
    for name in ("triton", "deepgemm"):
        yield pytest.param(name, "cpu", INTERPRETED, id=f"{name}-interpreted")
    if torch.cuda.is_available():
        on_gpu = ["sglang", "triton", "torch"] + ["deepgemm"] * bool(importlib.util.find_spec("deep_gemm"))
        for name in on_gpu:
            yield pytest.param(name, "cuda", {}, id=f"{name}-gpu")


@pytest.mark.parametrize(("name", "device", "environment"), list(runners()))
def test_an_expert_runner_keeps_its_guarantees(name, device, environment):
    done = subprocess.run(
        [sys.executable, str(CASES), name, device],
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **environment},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert report["checked"] > 30
