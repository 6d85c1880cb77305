"""Owns stock SGLang engines in processes of their own, of one thread each, to which batches are dealt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sgl_batch.errors import EngineError
from stock_binding.engine_log import Counts, counts_of, total

_RUNNER = Path(__file__).resolve().parent.parent / "runners" / "stock_batches.py"
# Pairs of prompt tokens and output tokens.
Lengths = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an engine, as its flags have them, and its model."""

    model: Path
    vocabulary: int
    max_running_requests: int
    max_total_tokens: int
    chunked_prefill_size: int

    def arguments(self) -> dict[str, Any]:
        """Return the engine's arguments."""
        return {
            "model_path": str(self.model),
            "vocabulary": self.vocabulary,
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "max_running_requests": self.max_running_requests,
            "max_total_tokens": self.max_total_tokens,
            "chunked_prefill_size": self.chunked_prefill_size,
            "log_level": "info",
            # One message for each decode step, for `engine_log`.
            "decode_log_interval": 1,
            # An engine that waits would keep a core busy, which the others need.
            "sleep_on_idle": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a batch took. `seconds`: by the clock, or of the processor; of the engine that takes longest."""

    seconds: float
    counts: Counts


@dataclass(slots=True)
class StockProcess:
    """One engine that starts. `ready` waits for it; `begin` and `finish` run a batch; `stop` ends it.

    `log`: the file of its messages.
    """

    limits: Limits
    log: Path
    _process: subprocess.Popen[str] = field(init=False)
    _begun: int = field(init=False, default=0)
    _prompt_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        with self.log.open("wb") as messages:
            self._process = subprocess.Popen(
                [sys.executable, str(_RUNNER), json.dumps(self.limits.arguments())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )

    def ready(self) -> None:
        """Wait until it has started. Raises EngineError if it ends instead."""
        self._answer()

    def begin(self, lengths: Lengths, times: int = 1) -> None:
        """Start a batch of sequences of these lengths, so many times one after the other; `finish` must follow."""
        assert self._process.stdin is not None, "it was opened with a pipe"
        self._begun = self.log.stat().st_size
        self._prompt_tokens = times * sum(prompt for prompt, _ in lengths)
        print(json.dumps({"lengths": list(lengths), "times": times}), file=self._process.stdin, flush=True)

    def finish(self, clock: str) -> Measured:
        """Wait for all of it. `clock`: "seconds" of the wall, or "processor_s" of the engine."""
        found: Mapping[str, float] = self._answer()
        with self.log.open("rb") as file:
            file.seek(self._begun)
            counts = counts_of(file.read().decode(errors="replace"), self._prompt_tokens)
        if counts.retracted != found["retracted"]:
            raise EngineError(
                f"stock SGLang's answers say that {found['retracted']} sequences were retracted, its messages in "
                f"{self.log} say {counts.retracted}"
            )
        return Measured(seconds=found[clock], counts=counts)

    def _answer(self) -> Any:
        assert self._process.stdout is not None, "it was opened with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"stock SGLang ended; its messages are in {self.log}")
        return json.loads(line)

    def stop(self) -> None:
        """End the engine and its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def dealt(lengths: Lengths, engines: int) -> list[Lengths]:
    """Return the sequences of each engine, dealt by turns."""
    return [lengths[index::engines] for index in range(engines)]


def measure(engines: Sequence[StockProcess], parts: Sequence[Lengths], clock: str, times: int = 1) -> Measured:
    """Run a batch on each engine at the same time. Returns the seconds of the slowest engine, and all counts.

    `clock`: "seconds" of the wall, or "processor_s", which other programs disturb less.
    """
    for engine, part in zip(engines, parts, strict=True):
        engine.begin(part, times)
    found = [engine.finish(clock) for engine in engines]
    return Measured(seconds=max(one.seconds for one in found), counts=total(one.counts for one in found))
