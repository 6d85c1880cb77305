"""Owns the trace file: every sequence's changes of state and every decision, in the order in which they happened."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import BinaryIO, TypeVar

from sgl_batch.core.actions import Action
from sgl_batch.core.coroutine import Transition
from sgl_batch.core.decision_record import Observed
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.plan import Plan
from sgl_batch.errors import ConfigError

A = TypeVar("A", bound=Action)


class TraceWriter:
    """Writes JSON lines: changes of state {"t", "sequence", "from", "to", "why"}, and decisions as core records them.

    `t` is Unix time in seconds. All ranks, and later engines, append to the same file. So a decision has its `rank`,
    and as `engine` the time at which the process began.
    """

    def __init__(self, path: str | None, rank: int = 0) -> None:
        self._file: BinaryIO | None = None
        self._engine = {"engine": round(time.time(), 3), "rank": rank}
        if path is not None:
            try:
                # Unbuffered: the lines of one write stay together in a file to which several ranks append.
                self._file = open(path, "ab", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise ConfigError(
                    f"trace_file {path!r} cannot be written ({os.strerror(error.errno or 0)}); "
                    "name a file in a directory that exists and is writable"
                ) from error

    @property
    def is_open(self) -> bool:
        """Whether there is a trace file."""
        return self._file is not None

    def write(self, transitions: Iterable[Transition]) -> None:
        """Write changes of state."""
        if self._file is None:
            return
        now = time.time()
        self._append(
            {
                "t": round(now, 6),
                "sequence": change.sequence_id,
                "from": change.before.value,
                "to": change.after.value,
                "why": change.why,
            }
            for change in transitions
        )

    def decided(
        self,
        make: Callable[[State, KVState], tuple[A, ...]],
        state: State,
        kv: KVState,
        plan: Plan,
        policy: str,
        decision: str,
        *,
        others_run: bool = False,
    ) -> tuple[A, ...]:
        """Return the decision of `make` from this state, and write its record, if there is a trace file.

        Args:
            make: makes the decision.
            state: the rank's sequences.
            kv: where their KV lies.
            plan: the plan in force.
            policy: the name of the KV policy.
            decision: what is decided; see `Observed.record`.
            others_run: whether another rank has rows to decode.
        """
        if self._file is None:
            return make(state, kv)
        observed = Observed(state, kv)
        made = make(observed.state, observed.kv)
        self.write_decision(observed.record(plan, policy, made, decision=decision, others_run=others_run))
        return made

    def write_decision(self, record: Mapping[str, object]) -> None:
        """Write the record of a decision."""
        self._append([{"t": round(time.time(), 6), **self._engine, **record}])

    def _append(self, events: Iterable[Mapping[str, object]]) -> None:
        assert self._file is not None, "there is no trace file"
        data = "".join(json.dumps(event) + "\n" for event in events)
        if data:
            self._file.write(data.encode("utf-8"))
