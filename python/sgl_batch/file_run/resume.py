"""Finds which lines an earlier run of the same input has finished, and prepares its files so that a run can go on.

The manifest decides whether the earlier run fits; nothing is run here.

A result line names its request line: its id is made of the run's id and the line's index. Result lines behind the first
unfinished line go to the files that wait beside the output, as in any run. They are on the disk there before the output
is cut, so that no kill loses any.
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
from sgl_batch.file_run.waiting_results import Finished, WaitingResults
from sgl_batch.jobs.result_lines import result_token
from sgl_batch.jobs.scratch import storage_errors


@dataclass(slots=True, kw_only=True)
class EarlierRun:
    """What an earlier run has done. The first `prefix` lines are in the files, in order; others wait beside."""

    run_id: str
    done: bytearray  # 1 for each request line that has its result line
    prefix: int = 0
    num_output: int = 0  # result lines of the prefix in the output
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
    """The output and error file of the run."""

    output: Path
    errors: Path

    @property
    def both(self) -> tuple[tuple[Path, bool], ...]:
        """Each file, with whether it holds failed lines."""
        return ((self.output, False), (self.errors, True))


class _ResultLines:
    """The whole lines of one file, one at a time. A torn last line counts as absent."""

    def __init__(self, path: Path, file: BinaryIO | None, *, failed: bool) -> None:
        self.path, self.failed = path, failed
        self._file = file
        self.end = 0  # of the current result line
        self.start = 0
        self.number = 0
        self.result_line = b""
        self.fields: dict[str, object] = {}
        self.step()

    @property
    def token(self) -> object:
        """The id of the current result line; None at the end."""
        return self.fields.get("id")

    def step(self) -> None:
        """Go to the next result line. Raises ConfigError for a line that is not JSON."""
        self.start, self.number = self.end, self.number + 1
        line = self._file.readline() if self._file is not None else b""
        self.result_line, self.fields = b"", {}
        if not line.endswith(b"\n"):
            return
        self.end += len(line)
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"line {self.number} of {self.path} is not JSON ({error}), so this run cannot be resumed; repair "
                "or remove the line, or start anew with --overwrite"
            ) from error
        self.result_line, self.fields = line, found if isinstance(found, dict) else {"id": ""}


def read_earlier(
    files: RunFiles, run_id: str, total: int, waiting: WaitingResults, *, retry_failed: bool
) -> EarlierRun:
    """Find what is done, and bring the files into a state from which a run can go on. Idempotent and crash-safe.

    Afterwards `waiting` has the result lines behind the prefix, and no others. Raises ConfigError where a file has a
    line that the run with this id did not write.
    """
    earlier = EarlierRun(run_id=run_id, done=bytearray(total))
    try:
        waiting.read_kept(total)
        with storage_errors(f"reading {files.output}"), ExitStack() as opened:
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


def _open(opened: ExitStack, path: Path, failed: bool) -> _ResultLines:
    file = opened.enter_context(path.open("rb")) if path.exists() else None
    return _ResultLines(path, file, failed=failed)


def _merge(
    earlier: EarlierRun, mains: Sequence[_ResultLines], waiting: WaitingResults, *, retry_failed: bool
) -> list[int]:
    """Go through all lines. Return where the prefix ends in each of the two files."""
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
                in_main, fields = Finished(index=index, result_line=one.result_line, failed=one.failed), one.fields
                end = one.end
            one.step()
        if kept is not None and (in_main is not None or (kept.failed and retry_failed)):
            waiting.release(index)  # the result line in the output or error file counts
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


def _fields_of(kept: Finished, token: str, waiting: WaitingResults) -> dict[str, object]:
    """Return the fields of a waiting result line. Raises ConfigError for one of another run."""
    try:
        fields = json.loads(kept.result_line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or fields.get("id") != token:
        raise ConfigError(
            f"the result of line {kept.index + 1} in {waiting.path_of(kept.index)} was not written by the run that is "
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
    with storage_errors(f"preparing {files.output} for the resumed run"):
        for (path, _), end in zip(files.both, ends, strict=True):
            if path.exists():
                with path.open("rb+") as file:
                    file.truncate(end)
                    os.fsync(file.fileno())


def _token(run_id: str, index: int) -> str:
    return f"batch_req_{result_token(run_id, index)}"
