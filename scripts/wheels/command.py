"""Owns the command scripts/wheelhouse: its arguments, the order of its steps and what it prints."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import tempfile
from pathlib import Path

from wheels.failure import WheelhouseError
from wheels.house import House
from wheels.instructions import INSTALL, VERSIONS, write_instructions, write_versions
from wheels.inventory import canonical, read_inventory
from wheels.own_wheels import build_kernels, build_package
from wheels.parts import MIB, parse_size, split_into_parts
from wheels.pip_runs import Pip
from wheels.resolution import Conflict, ResolvedWheel, Resolver
from wheels.target import OLDEST_GLIBC, Target
from wheels.trimming import OPTIONAL_LIBRARIES, PACKAGE, Trim

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "scripts" / "requirements-cpu.txt"
# Compiles the kernels on the target; torch requires it below 82, which the stand-in for a target's torch lacks.
BUILD_TOOL = "setuptools>=77,<82"
# The part of sglang-kernel that --parts keeps: Hopper's kernels without FlashAttention 3.
SMALLEST = Trim(capability=(9, 0), without=("flash_ops",))
# Smaller wheels are counted together.
LISTED_BYTES = 1_000_000

EPILOG = f"""\
Run it where there is a network; carry DIR to the machine without one, and follow DIR/{INSTALL} there.

examples:
  scripts/wheelhouse wheels --cpu --python 3.11
      a machine without a GPU: the versions of scripts/requirements-cpu.txt, as scripts/install has them
  scripts/wheelhouse wheels --cuda --python 3.12 --glibc 2.39
      NVIDIA GPUs: SGLang 0.5.16 with its CUDA stack, some gigabytes
  scripts/wheelhouse wheels --cuda --python 3.12 --have have.txt --compute-capability 9.0 --without flash_ops
      the same without what the machine has (python -m pip freeze --all > have.txt, there) and what an H100 or H200
      never loads
  scripts/wheelhouse wheels --cuda --python 3.12 --have have.txt --parts 38M
      that in folders of at most 38 MiB each, for a machine that takes no more at a time

--have: what is listed is not brought, nor what only it requires, and versions are held to it. Where a package that is
brought needs another version, this one wins, is listed and replaces the target's. torch, triton and nvidia-* are the
exception: with these the program stops, because other packages of the target are built against them. Take a line out
of FILE to have the wheelhouse bring that package.

--compute-capability: takes the kernels for other GPUs out of sglang-kernel's wheel, whose version becomes for instance
0.4.5+sm90, which satisfies SGLang's ==0.4.5. Without flash_ops there is no attention backend fa3: give SGLang
--attention-backend triton.

--parts: DIR gets folders part-1, part-2, ... beside the wheels, each with its INSTALL.txt. Their wheels keep their
versions and lack what sgl_batch never loads: xgrammar's static library, sglang.multimodal_gen, and all of flashinfer
but its Python. sglang-kernel is trimmed for --compute-capability 9.0 --without flash_ops, unless these say otherwise.

pip finds packages as always (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf). For --cpu let one of these
name a place that has a CPU build of torch; elsewhere torch may bring CUDA libraries, some gigabytes of them.
Run it again after an interruption, or after a change of options: what is there is not fetched again.
"""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/wheelhouse",
        description="Make a directory of wheels with which sgl_batch and SGLang install without a network.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="new, empty, or made by an earlier run")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--cpu", action="store_true", help="the target has no GPU")
    kind.add_argument("--cuda", action="store_true", help="the target has NVIDIA GPUs")
    parser.add_argument("--python", choices=("3.11", "3.12"), default="3.12", help="the target's; default: 3.12")
    oldest = ".".join(map(str, OLDEST_GLIBC))
    parser.add_argument("--glibc", default=oldest, help=f"the target's (ldd --version); default: {oldest}")
    parser.add_argument("--have", type=Path, metavar="FILE", help="what the target has: its `pip freeze` or `pip list`")
    parser.add_argument("--compute-capability", metavar="X.Y", help="the target's GPUs: 9.0 is H100 and H200")
    parser.add_argument(
        "--without", action="append", default=[], choices=sorted(OPTIONAL_LIBRARIES), help="a library of sglang-kernel"
    )
    parser.add_argument("--parts", metavar="SIZE", help="put trimmed wheels into folders of at most SIZE, such as 38M")
    return parser.parse_args(argv)


def wanted_parts(arguments: argparse.Namespace) -> int | None:
    """Return the bytes that a part may have, or None without parts. Raises WheelhouseError."""
    if arguments.parts is None:
        return None
    if arguments.cuda and arguments.have is None:
        raise WheelhouseError(
            "--parts with --cuda needs --have: torch's CUDA libraries are hundreds of megabytes each, which the target "
            "has to have already."
        )
    return parse_size(arguments.parts)


def two_numbers(option: str, text: str) -> tuple[int, int]:
    """Parse "9.0" as (9, 0). Raises WheelhouseError."""
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    if found is None:
        raise WheelhouseError(f"{option} is {text!r}; give two numbers with a point between them, such as 9.0.")
    return int(found[1]), int(found[2])


def wanted_trim(arguments: argparse.Namespace) -> Trim | None:
    """Return how sglang-kernel is trimmed, if it is. Raises WheelhouseError if options contradict each other."""
    if arguments.compute_capability is None:
        if arguments.without:
            raise WheelhouseError("--without needs --compute-capability: a trimmed wheel is named by its GPU.")
        return SMALLEST if arguments.parts and arguments.cuda else None
    if arguments.cpu:
        raise WheelhouseError("--compute-capability goes with --cuda: a machine without a GPU gets no sglang-kernel.")
    capability = two_numbers("--compute-capability", arguments.compute_capability)
    return Trim(capability=capability, without=tuple(sorted(set(arguments.without))))


class Wheelhouse:
    """One run of the command."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.cuda: bool = arguments.cuda
        self.target = Target(python=arguments.python, glibc=two_numbers("--glibc", arguments.glibc))
        self.trim = wanted_trim(arguments)
        self.part_bytes = wanted_parts(arguments)
        self.present = read_inventory(arguments.have) if arguments.have else {}
        self.house = House(arguments.directory)
        self.path = self.house.path.resolve()

    def make(self) -> None:
        """Run all steps."""
        with tempfile.TemporaryDirectory() as scratch:
            pip = Pip(Path(scratch))
            print("building sgl_batch's wheel")
            package = build_package(pip, ROOT, self.path)
            self.house.remember(package)
            wheels, conflicts = self._resolve(pip, package)
            self.house.fetch(pip, wheels, self.target, self.trim, print)
        names = [wheel.filename for wheel in wheels]
        if self.trim is SMALLEST and not any(wheel.name == PACKAGE for wheel in wheels):
            self.trim = None  # the user did not ask for it
        if self.trim is not None:
            print(f"trimming {PACKAGE}")
            trimmed = self.house.trim(wheels, self.trim)
            names = [trimmed if canonical(name.split("-")[0]) == PACKAGE else name for name in names]
        print("building the native kernels' wheel")
        torch = self.present.get("torch") or next((wheel.version for wheel in wheels if wheel.name == "torch"), None)
        kernels, reason = build_kernels(ROOT / "sgl-kernel", self.path, self.target, torch)
        self.house.remember(kernels)
        names.append(package.name)
        source = kernels.name if reason else None
        if source is None:
            names.append(kernels.name)
        self._write(names, source)
        parts = [] if self.part_bytes is None else split_into_parts(self.path, names, source, self.part_bytes)
        self._report(names, conflicts, source, reason)
        for part in parts:
            num_bytes = sum(file.stat().st_size for file in part.iterdir())
            print(f"{part.name}: {num_bytes / MIB:.1f} MiB in {len(list(part.iterdir())) - 1} files")

    def _resolve(self, pip: Pip, package: Path) -> tuple[list[ResolvedWheel], list[Conflict]]:
        """Return the wheels that the target needs besides ours, from the record if nothing has changed."""
        asked = self._asked()
        record = self.house.record
        if record.get("asked") != asked:
            print("resolving (minutes, where the index has no metadata files and wheels have to be read)")
            resolver = Resolver(pip, self.target, self.present)
            ours = f"{package}[{'cuda,' if self.cuda else ''}tables]"
            if self.cuda:
                found = resolver.resolve([ours, BUILD_TOOL])
                wheels = found.wheels
            else:
                # As in scripts/install: SGLang requires the CUDA stack, torchvision the installed torch.
                wheels = resolver.resolve([ours, "torch", BUILD_TOOL], PINS).wheels
                found = resolver.resolve(["sglang", "torchvision"], PINS, deps=False)
                wheels = wheels + found.wheels
            record["resolved"] = [wheel.to_json() for wheel in wheels if wheel.name != "sgl-batch"]
            record["conflicts"] = [[c.name, c.present, c.wanted_by, c.chosen] for c in found.conflicts]
            record["asked"] = asked
            self.house.save()
        wheels = [ResolvedWheel(**fields) for fields in record["resolved"]]
        conflicts = [
            Conflict(name=name, present=present, wanted_by=wanted_by, chosen=chosen)
            for name, present, wanted_by, chosen in record["conflicts"]
        ]
        return wheels, conflicts

    def _asked(self) -> str:
        """Return everything that the resolved wheels depend on, as one string."""
        parts = [
            str(self.cuda),
            BUILD_TOOL,
            self.target.python,
            str(self.target.glibc),
            str(sorted(self.present.items())),
        ]
        parts += [path.read_text(encoding="utf-8") for path in (ROOT / "pyproject.toml", PINS)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _write(self, names: list[str], source: str | None) -> None:
        write_versions(self.path, names)
        write_instructions(
            self.path, target=self.target, cuda=self.cuda, present=bool(self.present), source=source, trim=self.trim
        )
        self.house.remember(self.path / VERSIONS, self.path / INSTALL)
        self.house.remove_all_but([*names, VERSIONS, INSTALL, *([source] if source else [])])

    def _report(self, names: list[str], conflicts: list[Conflict], source: str | None, reason: str) -> None:
        sizes = {name: (self.path / name).stat().st_size for name in names}
        print(f"\n{'MB':>8}  wheel")
        for name, num_bytes in sorted(sizes.items(), key=lambda pair: -pair[1]):
            if num_bytes >= LISTED_BYTES:
                print(f"{num_bytes / 1e6:8.1f}  {name}")
        small = [num_bytes for num_bytes in sizes.values() if num_bytes < LISTED_BYTES]
        print(f"{sum(small) / 1e6:8.1f}  {len(small)} wheels below 1 MB ({VERSIONS} names them)")
        total = sum(sizes.values())
        print(f"{total / 1e6:8.1f}  sum of {len(names)} wheels")
        if self.trim is not None:
            trimmed = next(size for name, size in sizes.items() if canonical(name.split("-")[0]) == PACKAGE)
            whole: int = self.house.record["whole_bytes"]
            print(f"{(total - trimmed + whole) / 1e6:8.1f}  sum before trimming ({PACKAGE} {whole / 1e6:.1f})")
        for conflict in conflicts:
            print(
                f"replaced: the target has {conflict.name} {conflict.present}, the wheelhouse brings "
                f"{conflict.chosen or 'none'} ({conflict.wanted_by or 'the pins of requirements-cpu.txt'})"
            )
        if source is not None:
            print(f"native kernels: source only ({source}), because {reason}; they are built on the target, with g++")
        if not self.cuda and any(name.startswith("nvidia_") for name in names):
            print(
                "note: this torch brings CUDA libraries; PIP_EXTRA_INDEX_URL may name a place with a CPU build (--help)"
            )
        print(f"\nhow to install: {self.house.path / INSTALL}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    try:
        Wheelhouse(parse_arguments(argv)).make()
    except WheelhouseError as error:
        print(f"scripts/wheelhouse: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("scripts/wheelhouse: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0
