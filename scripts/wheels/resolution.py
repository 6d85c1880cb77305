"""Owns which wheels the target needs: pip's own resolver, held to what the target has, for the target's markers.

Does not fetch them, and does not decide what is asked for.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pip._vendor.packaging.requirements import Requirement  # the standard library cannot read requirements

from wheels.failure import WheelhouseError
from wheels.inventory import canonical, may_be_replaced, write_stand_in
from wheels.pip_runs import Pip, PipFailed
from wheels.target import Target

# "transformers 5.12.1 depends on numpy>=2" and, in the next lines, "The user requested (constraint) numpy (from ...)".
_HELD_BACK = re.compile(r"The user requested \(constraint\) ([A-Za-z0-9][\w.-]*)")
_WANTED = re.compile(r"^\s+(\S.*(?: depends on |requested ).*)$", re.MULTILINE)
_WITH_EXTRAS = re.compile(r"([A-Za-z0-9][\w.-]*)\[")
_NO_WHEEL = re.compile(
    r"No matching distribution found for (\S+)|no matching distributions available for your environment:\n\s+(\S+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedWheel:
    """One wheel that the target needs, and its URL."""

    name: str
    version: str
    url: str
    sha256: str

    @property
    def filename(self) -> str:
        """The wheel's file name."""
        return unquote(urlsplit(self.url).path).rsplit("/", 1)[-1]

    def to_json(self) -> dict[str, str]:
        """Return its form in the wheelhouse's record."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """The target has `present`, which does not fit `wanted_by`; the wheelhouse brings `chosen` instead."""

    name: str
    present: str
    wanted_by: str
    chosen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """The wheels to fetch, the packages that the target keeps, and those that are replaced."""

    wheels: list[ResolvedWheel]
    kept: dict[str, str]
    conflicts: list[Conflict]


class Resolver:
    """Runs pip's resolver until it succeeds: a package of the target that fits no solution is replaced."""

    def __init__(self, pip: Pip, target: Target, present: Mapping[str, str]) -> None:
        self._pip, self._target, self._present = pip, target, present
        self._conflicts: dict[str, Conflict] = {}
        # Present, but required with an extra: only its real metadata has the extra's requirements.
        self._by_version: set[str] = set()

    def resolve(self, requirements: Sequence[str], constraints: Path | None = None, *, deps: bool = True) -> Resolution:
        """Return the closure of the requirements. Raises WheelhouseError if there is none."""
        wanted = list(requirements)
        while True:
            items = self._ask(wanted, constraints, deps=deps)
            missing = self._missing(items) if deps else []
            if not missing:
                break
            wanted += missing
        reachable = self._walk(items)[0] if deps else {canonical(item["metadata"]["name"]) for item in items}
        wheels, kept = [], {}
        for item in items:
            name = canonical(item["metadata"]["name"])
            if name in self._present and name not in self._conflicts:
                kept[name] = self._present[name]
            elif name in reachable:
                wheels.append(_wheel(item))
        return Resolution(wheels=wheels, kept=kept, conflicts=self._settled(wheels))

    def _ask(self, requirements: list[str], constraints: Path | None, *, deps: bool) -> list[dict[str, Any]]:
        while True:
            with tempfile.TemporaryDirectory() as scratch:
                report = Path(scratch, "report.json")
                options = ["install", "--dry-run", "--ignore-installed", "--report", str(report)]
                options += ["--target", str(Path(scratch, "never")), *self._target.pip_options()]
                options += [] if deps else ["--no-deps"]
                options += ["-c", str(constraints)] if constraints else []
                options += ["-c", str(self._hold(Path(scratch)))]
                try:
                    self._pip.run([*options, *requirements])
                except PipFailed as failed:
                    self._give_way(str(failed))
                    continue
                items: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
            asked = self._with_extras(items) - self._by_version
            if not asked:
                return items
            self._by_version |= asked

    def _hold(self, scratch: Path) -> Path:
        """Return constraints under which pip keeps the target's packages, and adds nothing that only they need."""
        lines = []
        for name, version in self._present.items():
            if name in self._conflicts:
                continue
            if name in self._by_version:
                lines.append(f"{name}=={version.split('+')[0]}")
            else:
                lines.append(f"{name} @ {write_stand_in(scratch, name, version).as_uri()}")
        path = scratch / "held.txt"
        path.write_text("\n".join(lines), encoding="utf-8")
        return path

    def _give_way(self, output: str) -> None:
        """Record which of the target's packages conflicts, or raise an error if none can be replaced."""
        names = {canonical(name) for name in _HELD_BACK.findall(output)} & set(self._present) - set(self._conflicts)
        with_extras = {canonical(name) for name in _WITH_EXTRAS.findall(output)} & names - self._by_version
        if with_extras:
            # An older pip treats a stand-in without the extra as another package; it is required again by version.
            self._by_version |= with_extras
            return
        wanted_by = "; ".join(line for line in _WANTED.findall(output) if "(constraint)" not in line)
        wanted_by = wanted_by.replace("The user requested ", "asked for: ")
        fixed = sorted(name for name in names if not may_be_replaced(name))
        if fixed:
            raise WheelhouseError(
                "the target has "
                + ", ".join(f"{name} {self._present[name]}" for name in fixed)
                + f", but: {wanted_by}. torch, triton and the nvidia packages are never replaced unasked: other "
                "packages of the target are built against them. Take these lines out of --have's file, and the "
                "wheelhouse brings them; or prepare a target with the version that is wanted."
            )
        if not names:
            missing = _NO_WHEEL.search(output)
            raise WheelhouseError(
                (
                    f"there is no wheel of {missing[1] or missing[2]} for the target. "
                    if missing
                    else "pip finds no set of wheels. "
                )
                + f"The end of what pip said:\n{_tail(output)}\n"
                "Check the network, --python and --glibc; PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS name more places."
            )
        for name in names:
            self._conflicts[name] = Conflict(name=name, present=self._present[name], wanted_by=wanted_by)

    def _settled(self, wheels: Iterable[ResolvedWheel]) -> list[Conflict]:
        versions = {wheel.name: wheel.version for wheel in wheels}
        return [
            Conflict(name=c.name, present=c.present, wanted_by=c.wanted_by, chosen=versions.get(c.name, ""))
            for c in self._conflicts.values()
        ]

    def _edges(self, item: dict[str, Any], extras: Iterable[str]) -> list[Requirement]:
        """Return what this package requires on the target, with these extras."""
        found = []
        for text in item["metadata"].get("requires_dist", []):
            requirement = Requirement(text)
            environments = [{**self._target.markers(), "extra": extra} for extra in ("", *extras)]
            if requirement.marker is None or any(requirement.marker.evaluate(e) for e in environments):
                found.append(requirement)
        return found

    def _walk(self, items: list[dict[str, Any]]) -> tuple[set[str], list[Requirement]]:
        """Return the packages that are required on the target, and all their requirements there."""
        by_name = {canonical(item["metadata"]["name"]): item for item in items}
        waiting = [(name, frozenset(i.get("requested_extras", ()))) for name, i in by_name.items() if i["requested"]]
        seen: set[tuple[str, frozenset[str]]] = set()
        edges: list[Requirement] = []
        while waiting:
            name, extras = waiting.pop()
            if (name, extras) in seen or name not in by_name:
                continue
            seen.add((name, extras))
            found = self._edges(by_name[name], extras)
            if name in self._present and name not in self._conflicts:
                # The target has this package's own requirements; it may lack those of an extra.
                plain = {str(edge) for edge in self._edges(by_name[name], ())}
                found = [edge for edge in found if str(edge) not in plain]
            edges += found
            waiting += [(canonical(edge.name), frozenset(edge.extras)) for edge in found]
        return {name for name, _ in seen}, edges

    def _with_extras(self, items: list[dict[str, Any]]) -> set[str]:
        """Return the target's packages that are required with an extra."""
        held = set(self._present) - set(self._conflicts)
        return {canonical(edge.name) for edge in self._walk(items)[1] if edge.extras} & held

    def _missing(self, items: list[dict[str, Any]]) -> list[str]:
        """Return what is required on the target only: pip evaluates markers for the machine that it runs on."""
        there = {canonical(item["metadata"]["name"]) for item in items}
        edges = {canonical(edge.name): edge for edge in self._walk(items)[1]}
        return [f"{edge.name}{edge.specifier}" for name, edge in edges.items() if name not in there]


def _wheel(item: dict[str, Any]) -> ResolvedWheel:
    archive = item["download_info"].get("archive_info", {})
    return ResolvedWheel(
        name=canonical(item["metadata"]["name"]),
        version=item["metadata"]["version"],
        url=item["download_info"]["url"],
        sha256=_reported_sha256(archive),
    )


def _reported_sha256(archive: dict[str, Any]) -> str:
    """Return an archive's hash, or "" if pip knows none. A pip older than 23.1 writes it as "sha256=..." only."""
    algorithm, _, digest = archive.get("hash", "").partition("=")
    return str(archive.get("hashes", {}).get("sha256", digest if algorithm == "sha256" else ""))


def _tail(output: str, num_lines: int = 12) -> str:
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("WARNING")]
    return "\n".join(f"  {line}" for line in lines[-num_lines:])
