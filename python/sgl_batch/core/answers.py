"""Owns the plain values that an engine hands to a job: the answer to one request line, and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResponse:
    """The answer to one request line: an HTTP status and the body that the online endpoint returns."""

    status_code: int
    request_id: str
    body: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine started.

    counters: expert_calls, expert_rows, expert_gemms and others. If it has prompt_tokens and output_tokens, the
        progress takes its rates from them while long lines still run.
    part_s: seconds by part (attention, experts, router, copies, sampling, idle, other; with several ranks also
        exchange, agreement, stall, boundary). Idle is the time without work. On a GPU the parts of forward passes are
        the device's time, by samples.
    tokens_per_expert: tokens routed to each expert, summed over the layers.
    sequences: how many sequences are in each state (QUEUED, RUNNING, ...) now.
    ranks: the counters of each rank, if there are several; the other fields are then of all ranks together.
    peak_memory_bytes: the most that a rank's process had in memory since the model was loaded; 0 if not known.
    memory_budget_bytes: what a rank's process may have in memory; 0 without a budget. With several ranks, both are of
        the rank with the most.
    paused: whether the engine is paused; it counts nothing then.
    forward: which forward pass computes the model (core/supported_models); "" if not known.
    overflow_directory: where sequences that outgrow the device's pages wait in files, which have no name there; "" if
        they wait in a host KV store, or none can.
    """

    counters: Mapping[str, int] = field(default_factory=dict)
    part_s: Mapping[str, float] = field(default_factory=dict)
    tokens_per_expert: Sequence[int] = ()
    sequences: Mapping[str, int] = field(default_factory=dict)
    ranks: Sequence[EngineStats] = ()
    peak_memory_bytes: int = 0
    memory_budget_bytes: int = 0
    paused: bool = False
    forward: str = ""
    overflow_directory: str = ""

    @property
    def waiting_share(self) -> float:
        """Return the share of the time that was spent waiting: for requests, or for other ranks.

        If waits inside exchanges are not measured (`stall` is 0), all time of exchanges counts as waiting.
        """
        waits = ("idle", "agreement", "stall" if self.part_s.get("stall") else "exchange")
        return sum(self.part_s.get(part, 0.0) for part in waits) / max(sum(self.part_s.values()), 1e-9)

    def since(self, earlier: EngineStats) -> EngineStats:
        """Return what was counted after `earlier`, a reading of the same engine."""
        before = list(earlier.tokens_per_expert) or [0] * len(self.tokens_per_expert)
        ranks_before = list(earlier.ranks) or [EngineStats()] * len(self.ranks)
        return EngineStats(
            counters={key: value - earlier.counters.get(key, 0) for key, value in self.counters.items()},
            part_s={key: value - earlier.part_s.get(key, 0.0) for key, value in self.part_s.items()},
            tokens_per_expert=[now - then for now, then in zip(self.tokens_per_expert, before, strict=True)],
            sequences=self.sequences,
            ranks=tuple(now.since(then) for now, then in zip(self.ranks, ranks_before, strict=True)),
            peak_memory_bytes=self.peak_memory_bytes,
            memory_budget_bytes=self.memory_budget_bytes,
            paused=self.paused,
            forward=self.forward,
            overflow_directory=self.overflow_directory,
        )
