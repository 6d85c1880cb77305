"""What an earlier run of the same input left: which lines are done, and where; prepares its files to be gone on with.

It does not decide whether the earlier run fits (the manifest's comparison) nor run anything.

A record names its line: its id is made of the run's id and the line's index. Lines behind the first unfinished one
wait beside the output, as those do that a running run has finished early, and are on the disk there before anything is
cut off, so that no kill loses any.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from sgl_batch.errors import ConfigError
from sgl_batch.file_run.run_result import Failures
from sgl_batch.file_run.waiting_records import Finished, WaitingRecords
from sgl_batch.jobs.result_lines import record_token
from sgl_batch.jobs.scratch import storage_errors


@dataclass(slots=True, kw_only=True)
class EarlierRun:
    """What is done. `prefix`: so many lines from the first are in the files in order; the others wait beside."""

    run_id: str
    done: bytearray  # 1 for each line that has its record
    prefix: int = 0
    num_output: int = 0  # records of the prefix in the output
    num_errors: int = 0
    ok: int = 0
    failed: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    failures: Failures = field(default_factory=Failures)

    @property
    def num_done(self) -> int:
        """Lines that are not run again."""
        return self.ok + self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of a run that are gone on with."""

    output: Path
    errors: Path

    @property
    def both(self) -> tuple[tuple[Path, bool], ...]:
        """Each with whether it holds failed lines."""
        return ((self.output, False), (self.errors, True))


class _Records:
    """The whole lines of one file, one at a time; a torn last one counts as absent."""

    def __init__(self, path: Path, file: BinaryIO | None, *, failed: bool) -> None:
        self.path, self.failed = path, failed
        self._file = file
        self.end = 0  # of the current record
        self.start = 0
        self.number = 0
        self.record = b""
        self.fields: dict[str, object] = {}
        self.step()

    @property
    def token(self) -> object:
        """The id of the current record; None at the end."""
        return self.fields.get("id")

    def step(self) -> None:
        """Go to the next record. Raises ConfigError for a line that is none."""
        self.start, self.number = self.end, self.number + 1
        line = self._file.readline() if self._file is not None else b""
        self.record, self.fields = b"", {}
        if not line.endswith(b"\n"):
            return
        self.end += len(line)
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"line {self.number} of {self.path} is no JSON ({error}), so that this run cannot be resumed; repair "
                "or remove the line, or start anew with --overwrite"
            ) from error
        self.record, self.fields = line, found if isinstance(found, dict) else {"id": ""}


def read_earlier(
    files: RunFiles, run_id: str, total: int, waiting: WaitingRecords, *, retry_failed: bool
) -> EarlierRun:
    """Find what is done, and bring the files into a state that can be gone on with. Idempotent, crash-safe.

    `waiting` has the records behind the prefix then, and no others. Raises ConfigError where a file has a line that the
    run with this id did not write.
    """
    earlier = EarlierRun(run_id=run_id, done=bytearray(total))
    try:
        waiting.read_kept(total)
        with storage_errors(f"reading what is in {files.output}"), ExitStack() as opened:
            mains = [_open(opened, path, failed) for path, failed in files.both]
            ends = _merge(earlier, mains, waiting, retry_failed=retry_failed)
            for one in mains:
                if one.token is not None:
                    raise ConfigError(
                        f"line {one.number} of {one.path} was not written by the run that is to be resumed, or not for "
                        f"the first {total:,} lines of this input; remove it, or start anew with --overwrite"
                    )
    except ConfigError:
        waiting.remove_new()
        raise
    waiting.forget_before(earlier.prefix)
    waiting.sync([])
    _cut(files, ends)
    return earlier


def _open(opened: ExitStack, path: Path, failed: bool) -> _Records:
    file = opened.enter_context(path.open("rb")) if path.exists() else None
    return _Records(path, file, failed=failed)


def _merge(earlier: EarlierRun, mains: Sequence[_Records], waiting: WaitingRecords, *, retry_failed: bool) -> list[int]:
    """Go through all lines; returns where the prefix ends in each of the two files."""
    ends, in_prefix = [0, 0], True
    for index in range(len(earlier.done)):
        token = _token(earlier.run_id, index)
        kept = waiting.get(index)
        fields = {} if kept is None else _fields_of(kept, token, waiting)
        in_main: Finished | None = None
        for one in mains:
            if one.token != token:
                continue
            if not (one.failed and retry_failed):
                in_main, fields = Finished(index=index, record=one.record, failed=one.failed), one.fields
                end = one.end
            one.step()
        if kept is not None and (in_main is not None or (kept.failed and retry_failed)):
            waiting.release(index)  # the files' own record counts
            kept = None
        found = in_main or kept
        in_prefix = in_prefix and in_main is not None
        if found is None:
            continue
        earlier.done[index] = 1
        _count(earlier, found.failed, fields)
        if in_prefix:
            earlier.prefix = index + 1
            ends[found.failed] = end
            earlier.num_errors += found.failed
            earlier.num_output += not found.failed
        elif in_main is not None:
            waiting.put(in_main)
    return ends


def _fields_of(kept: Finished, token: str, waiting: WaitingRecords) -> dict[str, object]:
    """What a record says that waits. Raises ConfigError for one of another run."""
    try:
        fields = json.loads(kept.record)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or fields.get("id") != token:
        raise ConfigError(
            f"the record of line {kept.index + 1} in {waiting.path_of(kept.index)} was not written by the run that is "
            "to be resumed; remove that file, or start anew with --overwrite"
        )
    return fields


def _count(earlier: EarlierRun, failed: bool, fields: dict[str, object]) -> None:
    response = fields.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    body = body if isinstance(body, dict) else {}
    if failed:
        earlier.failed += 1
        error = body.get("error")
        error = error if isinstance(error, dict) else {}
        earlier.failures.add(str(error.get("code")), int(error.get("line") or 0), str(error.get("message")))
        return
    earlier.ok += 1
    usage = body.get("usage")
    if isinstance(usage, dict):
        earlier.tokens_in += int(usage.get("prompt_tokens") or 0)
        earlier.tokens_out += int(usage.get("completion_tokens") or 0)


def _cut(files: RunFiles, ends: Sequence[int]) -> None:
    """Cut the files back to the prefix."""
    with storage_errors(f"preparing {files.output} to be gone on with"):
        for (path, _), end in zip(files.both, ends, strict=True):
            if path.exists():
                with path.open("rb+") as file:
                    file.truncate(end)
                    os.fsync(file.fileno())


def _token(run_id: str, index: int) -> str:
    return f"batch_req_{record_token(run_id, index)}"
