"""Owns the doctor's checks of packages: their versions, whether they import, and what does not work without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sgl_batch.cli.doctor.machine import Machine
from sgl_batch.cli.doctor.rows import Check, Row, State
from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import BUILD_KERNELS
from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.absent_packages import REQUIREMENTS


class Need(StrEnum):
    """Where an engine needs a package: a broken one prevents it, and a missing one unless it is `replaced`."""

    ALWAYS = "always"
    ON_GPU = "on a GPU"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One package. `name`: shown in the table; `module`: imported by the check; `lacks`: what does not work without it.

    `replaced`: where it is not installed, an engine uses something else.
    """

    name: str
    distribution: str
    module: str
    need: Need
    lacks: str
    remedy: str
    replaced: bool = False


_INSTALL = "scripts/install (without a GPU), or pip install '.[cuda]' (with one)"
_CUDA = "pip install '.[cuda]' brings it"

PACKAGES = (
    Package(name="torch", distribution="torch", module="torch", need=Need.ALWAYS, lacks="", remedy=_INSTALL),
    Package(name="triton", distribution="triton", module="triton", need=Need.ALWAYS, lacks="", remedy=_INSTALL),
    Package(
        name="xgrammar",
        distribution="xgrammar",
        module="xgrammar",
        need=Need.ALWAYS,
        lacks="requests for JSON schemas, regular expressions and grammars are refused",
        remedy=f"pip install {REQUIREMENTS['xgrammar']}",
        replaced=True,
    ),
    Package(
        name="sgl_batch_kernel",
        distribution="sgl-batch-kernel",
        module="sgl_batch_kernel",
        need=Need.NEVER,
        lacks="no host KV store and no streamed weights; on a CPU, experts and linear layers several times slower",
        remedy=f"{BUILD_KERNELS} (g++ 11 or newer)",
    ),
    Package(
        name="flashinfer",
        distribution="flashinfer_python",
        module="flashinfer.sampling",
        need=Need.ON_GPU,
        lacks="tokens are sampled by torch's operators",
        remedy=f"pip install {REQUIREMENTS['flashinfer']}",
        replaced=True,
    ),
    Package(
        name="sgl_kernel",
        distribution="sglang-kernel",
        module="sgl_kernel",
        need=Need.ON_GPU,
        lacks="SGLang's own kernels",
        remedy=_CUDA,
    ),
    Package(
        name="flash_attn_3 (fa3)",
        distribution="sglang-kernel",
        module="sgl_kernel.flash_ops",
        need=Need.NEVER,
        lacks="attention runs on Triton (--attention-backend triton)",
        remedy=_CUDA,
    ),
    Package(
        name="deep_gemm",
        distribution="sgl-deep-gemm",
        module="deep_gemm",
        need=Need.NEVER,
        lacks="no --expert-runner deepgemm",
        remedy=_CUDA,
    ),
    Package(
        name="deep_ep",
        distribution="sgl-deep-ep",
        module="deep_ep",
        need=Need.NEVER,
        lacks="no --token-dispatcher deepep",
        remedy="build it for this torch; NCCL serves without it",
    ),
)


def check_of(package: Package) -> Check:
    """Return the check of a package."""
    return Check(
        name=package.name,
        rows=lambda machine: [package_row(package, machine)],
        remedy=package.remedy,
        required=package.need is Need.ALWAYS,
        timeout_s=20.0,
        after="" if package.name == "torch" else "device",
    )


def package_row(package: Package, machine: Machine) -> Row:
    """Check whether a package is installed and imports."""
    version = machine.version_of(package.distribution)
    required = package.need is Need.ALWAYS
    if package.need is not Need.ALWAYS and package.module != "sgl_batch_kernel" and not machine.has_gpu:
        found = f"{version}, not imported" if version else "not installed"
        state = State.OK if version else State.MISSING
        return Row(check=package.name, state=state, found=f"{found}; only engines on a GPU use it")
    required = required or package.need is Need.ON_GPU
    lacks = package.lacks or "no engine runs"
    try:
        module = machine.load(package.module)
    except ModuleNotFoundError as error:
        if version is not None and error.name is not None and not package.module.startswith(error.name):
            return _broken(package, version, error, required=required)
        return Row(
            check=package.name,
            state=State.MISSING,
            found=f"not installed: {lacks}",
            remedy=package.remedy,
            required=required and not package.replaced,
        )
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return _broken(package, version, error, required=required)
    shown = version or str(getattr(module, "__version__", "of an unknown version"))
    return Row(check=package.name, state=State.OK, found=shown, required=required, values={"version": shown})


def _broken(package: Package, version: str | None, error: Exception, *, required: bool) -> Row:
    message = (str(error).strip().splitlines() or ["no message"])[0]
    return Row(
        check=package.name,
        state=State.FAILED,
        found=f"{version or 'installed'}, does not import: {type(error).__name__}: {message}",
        remedy=package.remedy,
        required=required,
    )


def sglang(machine: Machine) -> Sequence[Row]:
    """Check whether SGLang has the version that we extend, and imports."""
    try:
        version = bootstrap.sglang_version()
    except ConfigError as error:
        state = State.FAILED if machine.version_of("sglang") else State.MISSING
        return [Row(check="sglang", state=state, found=str(error), required=True)]
    with bootstrap.importing():
        machine.load("sglang")
    return [Row(check="sglang", state=State.OK, found=version, required=True, values={"version": version})]
