"""Owns the doctor's checks of devices: GPUs and their driver, attention backends, and our CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.cli.doctor.machine import Machine
from sgl_batch.cli.doctor.rows import Row, State

_HOPPER = (9, 0)


def driver(machine: Machine) -> Sequence[Row]:
    """Check NVIDIA's driver, by its file in /proc."""
    text = machine.text("proc/driver/nvidia/version")
    if text is None:
        return [Row(check="driver", state=State.MISSING, found="no NVIDIA driver: the engine runs on the CPU")]
    return [Row(check="driver", state=State.OK, found=text.splitlines()[0].removeprefix("NVRM version: "))]


def devices(machine: Machine) -> Sequence[Row]:
    """Check the devices that torch computes on, with their memory."""
    torch = machine.load("torch")
    runtime = torch.version.cuda
    has_driver = machine.text("proc/driver/nvidia/version") is not None
    if torch.cuda.is_available():
        return [_gpu(torch, number) for number in range(torch.cuda.device_count())]
    built = f"torch is built for CUDA {runtime}" if runtime else "torch is a CPU build"
    remedy = ""
    if has_driver:
        remedy = (
            "update the driver, or check CUDA_VISIBLE_DEVICES"
            if runtime
            else "install torch with CUDA: pip install '.[cuda]'"
        )
    return [
        Row(
            check="device",
            state=State.WARNING if has_driver else State.OK,
            found=f"CPU ({built}{', although there is a driver for GPUs' if has_driver else ''})",
            remedy=remedy,
            required=True,
            values={"device": "cpu", "cuda_runtime": runtime},
        )
    ]


def _gpu(torch: Any, number: int) -> Row:
    free, total = torch.cuda.mem_get_info(number)
    capability = torch.cuda.get_device_capability(number)
    name = torch.cuda.get_device_name(number)
    return Row(
        check=f"device {number}",
        state=State.OK,
        found=f"{name}, sm{capability[0]}{capability[1]}, {format_bytes(free)} free of {format_bytes(total)}, "
        f"CUDA {torch.version.cuda} in torch",
        required=True,
        values={
            "device": name,
            "capability": list(capability),
            "free_bytes": free,
            "total_bytes": total,
            "cuda_runtime": torch.version.cuda,
        },
    )


def instruction_set(machine: Machine) -> Sequence[Row]:
    """Check which of our CPU kernels run here, and which are chosen. Raises RuntimeError for a wrong choice."""
    try:
        kernels = machine.load("sgl_batch_kernel")
    except (ImportError, OSError, StopIteration) as error:
        return [
            Row(
                check="CPU kernels",
                state=State.WARNING,
                found=f"not loaded ({type(error).__name__}): a CPU computes with torch's operators, several times "
                "slower",
                remedy="scripts/install builds them (g++ 11 or newer)",
            )
        ]
    chosen, runnable = kernels.isa(), kernels.runnable_isas()
    asked = machine.environment.get("SGL_BATCH_ISA")
    return [
        Row(
            check="CPU kernels",
            state=State.OK,
            found=f"{chosen} ({'by SGL_BATCH_ISA' if asked else 'the best'} of {', '.join(runnable)})",
            required=True,
            values={"isa": chosen, "runnable": runnable},
        )
    ]


def attention(machine: Machine) -> Sequence[Row]:
    """Check which attention backends can run here. The first one is an engine's default."""
    if not machine.has_gpu:
        native = _imports(machine, "sgl_batch_kernel")
        found = f"sgl_batch_cpu ({'our kernels' if native else 'by torch operators'})"
        return [Row(check="attention backends", state=State.OK, found=found, values={"runnable": ["sgl_batch_cpu"]})]
    hopper = tuple(machine.load("torch").cuda.get_device_capability(0)) == _HOPPER
    able = [
        *(["fa3"] if hopper and _imports(machine, "sgl_kernel.flash_ops") else []),
        *(["triton"] if _imports(machine, "triton") else []),
        *(["flashinfer"] if _imports(machine, "flashinfer.sampling") else []),
    ]
    return [
        Row(
            check="attention backends",
            state=State.OK if able else State.MISSING,
            found=", ".join(able) or "none",
            remedy="" if able else "install triton",
            required=True,
            values={"runnable": able},
        )
    ]


def _imports(machine: Machine, module: str) -> bool:
    try:
        machine.load(module)
    except (ImportError, OSError, RuntimeError, StopIteration):
        return False
    return True
