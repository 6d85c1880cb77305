"""Owns the list of the doctor's checks, in the order of its table."""

from __future__ import annotations

from sgl_batch.cli.doctor import device_checks, host_checks, model_checks, package_checks, rate_checks
from sgl_batch.cli.doctor.rows import Check

_TORCH, *_OTHERS = package_checks.PACKAGES

CHECKS: tuple[Check, ...] = (
    Check(name="python", rows=host_checks.python, required=True),
    Check(name="platform", rows=host_checks.system),
    Check(name="memory", rows=host_checks.memory),
    Check(name="huge pages", rows=host_checks.huge_pages),
    Check(name="/dev/shm", rows=host_checks.shared_memory),
    Check(name="open files", rows=host_checks.open_files),
    package_checks.check_of(_TORCH),
    Check(name="driver", rows=device_checks.driver),
    Check(
        name="device",
        rows=device_checks.devices,
        required=True,
        remedy="check whether nvidia-smi answers, and what the kernel's log (dmesg) says",
        timeout_s=15.0,
        after="torch",
    ),
    Check(
        name="sglang",
        rows=package_checks.sglang,
        required=True,
        remedy="run scripts/install again",
        timeout_s=30.0,
        after="device",
    ),
    *(package_checks.check_of(package) for package in _OTHERS),
    Check(
        name="CPU kernels",
        rows=device_checks.instruction_set,
        required=True,
        remedy="set SGL_BATCH_ISA to an instruction set of this processor, or unset it",
    ),
    Check(name="attention backends", rows=device_checks.attention, required=True, after="device"),
    Check(name="copies", rows=rate_checks.copies, after="device"),
    Check(name="disk", rows=rate_checks.disk),
    Check(name="model", rows=model_checks.model, required=True),
    Check(name="self-checks", rows=model_checks.self_checks, after="device"),
)
