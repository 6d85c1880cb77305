"""Owns the files for the user who installs the wheels: the list of versions and INSTALL.txt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wheels.inventory import canonical
from wheels.target import Target
from wheels.trimming import OPTIONAL_LIBRARIES, Trim

VERSIONS = "requirements.txt"
INSTALL = "INSTALL.txt"


def write_versions(house: Path, wheels: Sequence[str]) -> Path:
    """Return every wheel by name and version: pip installs these and needs nothing else."""
    pairs = sorted((canonical(name.split("-")[0]), name.split("-")[1]) for name in wheels)
    path = house / VERSIONS
    path.write_text("".join(f"{name}=={version}\n" for name, version in pairs), encoding="utf-8")
    return path


def write_instructions(
    house: Path, *, target: Target, cuda: bool, present: bool, source: str | None, trim: Trim | None
) -> Path:
    """Return how to install without a network. `source` is the kernels' archive, if they have no wheel."""
    python = f"python{target.python}"
    glibc = f"{target.glibc[0]}.{target.glibc[1]}"
    environment = (
        "An environment that sees the packages of the machine (torch and CUDA among them):\n"
        f"    {python} -m venv --system-site-packages env\n"
        if present
        else f"An environment of its own:\n    {python} -m venv env\n"
    )
    install = f"    env/bin/python -m pip install --no-index --find-links . --no-deps -r {VERSIONS}\n"
    parts = [
        f"sgl_batch and SGLang for CPython {target.python} on x86-64 Linux, glibc {glibc} or newer, "
        f"{'NVIDIA GPUs' if cuda else 'no GPU'}, without a network.\nRun this in the directory of this file.\n",
        environment,
        f"All wheels, in exactly the versions that were resolved together:\n{install}",
    ]
    if source is not None:
        parts.append(
            "The native CPU kernels, of which there is only the source here (needs g++ 11 or newer and\n"
            "Python's headers; without them torch operators do the same on a CPU, slower, and a warning says so):\n"
            f"    env/bin/python -m pip install --no-index --no-deps --no-build-isolation ./{source}\n"
        )
    if cuda:
        parts.append("To see that nothing is missing:\n    env/bin/python -m pip check\n")
    parts.append("And then:\n    env/bin/sgl-batch --help\n")
    if trim is not None:
        parts.append(_trimmed(trim))
    path = house / INSTALL
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def _trimmed(trim: Trim) -> str:
    major, minor = trim.capability
    text = (
        f"sglang-kernel has only the kernels for compute capability {major}.{minor} (folder {trim.folder()}). On\n"
        "another GPU, and where no GPU is to be seen, `import sgl_kernel` may fail: it looks for the other folder.\n"
    )
    for name in trim.without:
        text += f"It lacks {name}: {OPTIONAL_LIBRARIES[name]}.\nGive --attention-backend triton.\n"
    return text
