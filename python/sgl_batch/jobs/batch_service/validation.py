"""Finds the faults that fail a whole job, reading its input once in bounded memory.

Faults for which the online endpoint answers 4xx are not looked for here: such a line gets its own error when it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_batch.core.plan_rates import Load
from sgl_batch.errors import RequestError
from sgl_batch.jobs.batch_service.line_offsets import LineOffsets
from sgl_batch.jobs.body_rules import refuse, show
from sgl_batch.jobs.line_reader import RawLine, read_lines
from sgl_batch.jobs.request_lengths import RequestLengths
from sgl_batch.jobs.request_line import (
    INVALID_NUMBER,
    INVALID_UNICODE,
    ClaimId,
    parse_custom_id,
    parse_envelope,
    parse_object,
    refuse_repeated,
)
from sgl_batch.jobs.seen_ids import SeenIds

MAX_ERRORS = 100
_MOST_TOKENS = 1 << 24  # of an output: a line that asks for more is refused when it runs
# Codes of request_line, and the coarser codes that OpenAI's clients know.
_CODES = {
    "line_not_an_object": "invalid_json_line",
    "missing_url": "url_mismatch",
    "url_not_supported": "url_mismatch",
    "invalid_method": "missing_method",
    "invalid_custom_id": "missing_custom_id",
    "invalid_body": "missing_body",
}
# Faults that do not fail the job: such a line gets its own error when it runs.
_LINE_FAULTS = (INVALID_NUMBER, INVALID_UNICODE)


class StoppedError(Exception):
    """The work was stopped: its result is no longer wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRules:
    """The endpoint, models and limits that lines are checked against."""

    endpoint: str
    served_model_names: Sequence[str]
    max_lines: int
    max_line_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFault:
    """One reason why the job fails. `line` counts from 1 as in an editor; None where it is the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedInput:
    """What validation found. With any fault, the job fails. `load` is estimated, with outputs at their limits."""

    total: int
    model: str | None
    offsets: bytes
    faults: tuple[JobFault, ...]
    load: Load


def validate_input(path: Path, scratch: Path, rules: ValidationRules, stop: threading.Event) -> ValidatedInput:
    """Read the input once, up to 100 faults. Raises StorageError, or StoppedError once `stop` is set."""
    seen = SeenIds(scratch)
    try:
        return _Validation(rules, seen.claim).run(path, stop)
    finally:
        seen.close()


class _Validation:
    def __init__(self, rules: ValidationRules, claim_id: ClaimId) -> None:
        self._rules = rules
        self._claim_id = claim_id
        self._offsets = LineOffsets()
        self._lengths = RequestLengths()
        self._load = Load()
        self._faults: list[JobFault] = []
        self._model: str | None = None
        self._model_line = 0

    def run(self, path: Path, stop: threading.Event) -> ValidatedInput:
        total = 0
        for raw in read_lines(path, self._rules.max_line_bytes):
            if stop.is_set():
                raise StoppedError
            total += 1
            if total > self._rules.max_lines:
                self._add(
                    "too_many_tasks", f"the input has more than {self._rules.max_lines:,} lines, the limit; split it"
                )
                break
            self._offsets.note(raw)
            self._check(raw, self._check_line)
            if len(self._faults) >= MAX_ERRORS:
                break
        if total == 0:
            self._add("empty_batch", "the input has only blank lines; give at least one request")
        return ValidatedInput(
            total=total,
            model=self._model,
            offsets=self._offsets.packed(),
            faults=tuple(self._faults[:MAX_ERRORS]),
            load=self._load,
        )

    def _check(self, raw: RawLine, check: Callable[[RawLine], None]) -> None:
        try:
            check(raw)
        except RequestError as error:
            if error.code in _LINE_FAULTS:
                return
            self._add(_CODES.get(error.code, error.code), error.message, raw.number, error.param)

    def _check_line(self, raw: RawLine) -> None:
        line, _ = parse_object(raw, self._rules.max_line_bytes)
        refuse_repeated(parse_custom_id(line), raw.number, self._claim_id)
        url, body = parse_envelope(line)
        if url != self._rules.endpoint:
            refuse("url_mismatch", f"url is {show(url)} and the job's endpoint is {show(self._rules.endpoint)}", "url")
        self._check_model(body, raw.number)
        self._count(body)

    def _check_model(self, body: dict[str, object], number: int) -> None:
        """Check that all lines ask for one model, which is served. A line that names none gets its own error later."""
        model = body.get("model")
        if not isinstance(model, str):
            return
        served = self._rules.served_model_names
        if model not in served:
            names = " or ".join(show(name) for name in served)
            refuse("model_mismatch", f"model {show(model)} is not served here; served is {names}", "model")
        if self._model is None:
            self._model, self._model_line = model, number
        elif model != self._model:
            refuse(
                "model_mismatch",
                f"model is {show(model)}, and {show(self._model)} in line {self._model_line}; a job has one model",
                "model",
            )

    def _count(self, body: dict[str, object]) -> None:
        """Add a request's lengths to the load."""
        found = [one for one in self._lengths.requests(body) if one.output <= _MOST_TOKENS]
        if found:
            one, choices = found[0], len(found)
            self._load += Load(
                prompt_tokens=choices * one.prompt, output_tokens=choices * one.output, longest_output=one.output
            )

    def _add(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        self._faults.append(JobFault(code=code, message=message, line=line, param=param))
