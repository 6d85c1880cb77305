"""Every expert runner that this machine can run keeps the same promises, with the same suite.

On a CPU: the native kernels under each instruction set, torch, our Triton kernels by Triton's interpreter, and the
runner for DeepGEMM over a stand-in for its GEMM. On a GPU: Triton, torch, SGLang's, and DeepGEMM where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sgl_batch.kernel_loader import native_kernels

CASES = Path(__file__).with_name("expert_cases.py")
# The interpreter multiplies with numpy's BLAS, whose kernels for some processors give a row other bits in other places.
INTERPRETED = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem", "CUDA_VISIBLE_DEVICES": ""}


def runners() -> list[tuple[str, str, dict[str, str]]]:
    """Runner, device and environment of each run."""
    kernels = native_kernels()
    found = [("native", "cpu", {"SGL_BATCH_ISA": isa}) for isa in (kernels.runnable_isas() if kernels else ())]
    found.append(("torch", "cpu", {}))
    found += [(name, "cpu", INTERPRETED) for name in ("triton", "deepgemm")]
    if torch.cuda.is_available():
        found += [("triton", "cuda", {}), ("torch", "cuda", {}), ("sglang", "cuda", {})]
        found += [("deepgemm", "cuda", {})] if importlib.util.find_spec("deep_gemm") else []
    return found


@pytest.mark.parametrize(("name", "device", "environment"), runners(), ids=lambda value: "-".join(value) or "plain")
def test_an_expert_runner_keeps_its_promises(name, device, environment):
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
