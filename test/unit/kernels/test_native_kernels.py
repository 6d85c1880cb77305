"""The native kernels against float64, on every instruction set of this machine; a row's bits are its own."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sgl_batch_kernel
import sgl_batch_kernel.expert_loader

from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import expert_loader_kernels, native_kernels
from sgl_batch.processor import read_processor

CASES = Path(__file__).with_name("kernel_cases.py")


@pytest.mark.parametrize("isa", sgl_batch_kernel.runnable_isas())
def test_every_kernel_agrees_with_float64_on_each_instruction_set(isa):
    """Each instruction set in a process of its own: the choice is made once."""
    done = subprocess.run(
        [sys.executable, str(CASES)],
        env={**os.environ, "SGL_BATCH_ISA": isa, "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["isa"] == isa
    assert report["checked"] > 100
    assert report["failures"] == []


def test_weights_are_widened_where_that_multiplies_faster_than_pairs_of_bf16():
    flags, vendor = read_processor().flags, Path("/proc/cpuinfo").read_text(encoding="utf-8")
    of_bf16 = [isa for isa in sgl_batch_kernel.runnable_isas() if isa in ("avx512_bf16", "avx512_widened")]
    if "avx512_bf16" not in flags:
        assert of_bf16 == []
    elif "GenuineIntel" in vendor and "avx512_fp16" in flags:
        assert of_bf16 == ["avx512_widened", "avx512_bf16"]
    else:
        assert of_bf16 == ["avx512_bf16", "avx512_widened"]


def test_kernels_of_another_interface_are_not_used_and_a_warning_says_so(monkeypatch, caplog):
    monkeypatch.setattr(native_kernels(), "INTERFACE", 1)
    with caplog.at_level(logging.WARNING):
        assert native_kernels.__wrapped__() is None
    assert "are of another version (interface 1, not 20)" in caplog.text


def test_a_loader_of_experts_of_another_interface_is_refused(monkeypatch):
    monkeypatch.setattr(sgl_batch_kernel.expert_loader, "INTERFACE", 1)
    with pytest.raises(ConfigError, match=r"--weights streamed .* of an older version: .* or use --weights resident"):
        expert_loader_kernels()


def test_an_instruction_set_that_the_machine_lacks_is_named_with_those_it_has():
    program = (
        "from sgl_batch.kernel_loader import kernels_in_use\n"
        "from sgl_batch.errors import ConfigError\n"
        "try:\n    kernels_in_use()\nexcept ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "SGL_BATCH_ISA": "mmx"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert "SGL_BATCH_ISA is 'mmx'; this machine runs " in done.stdout
    assert "portable" in done.stdout
