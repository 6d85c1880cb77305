"""Owns the directory of wheels: present, fetched, trimmed and superseded files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from wheels.failure import WheelhouseError
from wheels.pip_runs import Pip, PipFailed
from wheels.resolution import ResolvedWheel
from wheels.target import Target
from wheels.trimming import PACKAGE, Trim, trim_wheel

RECORD = ".wheelhouse.json"
_FETCHED_TOGETHER = 8
_SCRATCH = "partial"


class House:
    """One directory, with a record of what it was made from and which of its files this program wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._record_path = path / RECORD
        if path.exists() and not path.is_dir():
            raise WheelhouseError(f"{path} is a file. Name a directory, new or made by an earlier run.")
        path.mkdir(parents=True, exist_ok=True)
        if self._record_path.exists():
            try:
                self.record: dict[str, Any] = json.loads(self._record_path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise WheelhouseError(f"{self._record_path} is damaged ({error}). Remove it and the wheels.") from error
        elif any(path.iterdir()):
            raise WheelhouseError(
                f"{path} holds other files. Name a new or empty directory: all that lies there is installed from."
            )
        else:
            self.record = {}
            self.save()

    def save(self) -> None:
        """Write the record completely or not at all."""
        partial = self._record_path.with_suffix(".partial")
        partial.write_text(json.dumps(self.record, indent=1), encoding="utf-8")
        partial.replace(self._record_path)

    def remember(self, *paths: Path) -> None:
        """Record files as written by this program."""
        self.record["files"] = sorted({*self.record.get("files", []), *(path.name for path in paths)})
        self.save()

    def remove_all_but(self, wanted: Iterable[str]) -> None:
        """Remove the files of an earlier run that are not needed any more."""
        keep = set(wanted)
        for name in self.record.get("files", []):
            if name not in keep:
                (self.path / name).unlink(missing_ok=True)
        self.record["files"] = sorted(keep & set(self.record.get("files", [])))
        self.save()

    def fetch(
        self, pip: Pip, wheels: list[ResolvedWheel], target: Target, trim: Trim | None, say: Callable[[str], None]
    ) -> None:
        """Fetch missing wheels, a few at a time, so that an interruption loses little."""
        missing = [wheel for wheel in wheels if not self._has(wheel, trim)]
        if len(missing) < len(wheels):
            say(f"{len(wheels) - len(missing)} of {len(wheels)} wheels are there already")
        for start in range(0, len(missing), _FETCHED_TOGETHER):
            group = missing[start : start + _FETCHED_TOGETHER]
            say(f"[{start + len(group)}/{len(missing)}] " + ", ".join(wheel.name for wheel in group))
            self._fetch_group(pip, group, target)

    def _fetch_group(self, pip: Pip, group: list[ResolvedWheel], target: Target) -> None:
        scratch = self.path / _SCRATCH
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        urls = [f"{wheel.url}#sha256={wheel.sha256}" if wheel.sha256 else wheel.url for wheel in group]
        try:
            pip.run(["download", "--quiet", "--no-deps", "--dest", str(scratch), *target.pip_options(), *urls])
        except PipFailed as failed:
            raise WheelhouseError(
                f"a download failed. The end of what pip said:\n{str(failed)[-1500:]}\n"
                "Run the same command again: what is there is not fetched again."
            ) from failed
        for wheel in group:
            (scratch / wheel.filename).replace(self.path / wheel.filename)
        self.remember(*(self.path / wheel.filename for wheel in group))
        scratch.rmdir()

    def _has(self, wheel: ResolvedWheel, trim: Trim | None) -> bool:
        if trim is not None and wheel.name == PACKAGE and (self.path / trim.trimmed_name(wheel.filename)).exists():
            return True
        path = self.path / wheel.filename
        return path.is_file() and (not wheel.sha256 or _sha256(path) == wheel.sha256)

    def trim(self, wheels: list[ResolvedWheel], trim: Trim) -> str:
        """Replace the whole wheel by the trimmed one; return its file name. The record keeps the whole wheel's size."""
        wheel = next((wheel for wheel in wheels if wheel.name == PACKAGE), None)
        if wheel is None:
            raise WheelhouseError(
                f"--compute-capability trims {PACKAGE}, which is not among the wheels: the target has it already "
                "(--have). Leave out --compute-capability, or take its line out of the list."
            )
        whole = self.path / wheel.filename
        name = trim.trimmed_name(wheel.filename)
        if not (self.path / name).exists():
            self.record["whole_bytes"] = whole.stat().st_size
            self.save()
            self.remember(trim_wheel(whole, trim))
        whole.unlink(missing_ok=True)
        return name


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
