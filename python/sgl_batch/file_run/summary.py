"""Makes the text at the end of a run: results, speed, where the time went, load of experts."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.core.answers import EngineStats
from sgl_batch.file_run.run_result import FailureKind, RunResult, RunStatus
from sgl_batch.jobs.progress_display import duration

SHOWN_FAILURE_CODES = 8

# A part of less of the time is not shown.
_SHARE_SHOWN = 0.0005


def format_summary(result: RunResult) -> str:
    """Return the summary as several lines for a terminal."""
    lines = [_headline(result), *_speed(result)]
    if result.cost is not None:
        lines.append(f"  cost        {result.cost.line()}")
    if result.failed:
        lines += _failures(result)
    if result.stats is not None:
        lines += [
            *_forward(result.stats),
            *_memory(result.stats),
            *_computed_twice(result.stats),
            *_sharing(result.stats),
        ]
        lines += [*_store(result.stats), *_overflow(result.stats), *_graphs(result.stats), *_drafts(result.stats)]
        lines += _time_table(result.stats)
        lines += [*_rank_table(result.stats), *_partitions(result.stats)]
        lines += _experts(result.stats)
    if result.plan is not None:
        lines += result.plan.lines()
    lines += [f"Plan during the run: {one['line']}" for one in result.refinements]
    if result.ok == 0:
        lines.append("Warning: no line has an output.")
    return "\n".join(lines)


def _headline(result: RunResult) -> str:
    verb = {RunStatus.COMPLETED: "Done", RunStatus.INTERRUPTED: "Interrupted", RunStatus.FAILED: "Failed"}
    missing = f", {result.missing:,} missing" if result.missing else ""
    kept = f" ({result.kept:,} of them kept from an earlier run)" if result.kept else ""
    return (
        f"{verb[result.status]}: {result.ok:,} of {result.total:,} lines ok, {result.failed:,} failed"
        f"{missing}{kept}, in {duration(result.wall_s)} ({result.wall_s:.1f} s)"
    )


def _speed(result: RunResult) -> list[str]:
    wall_s = max(result.wall_s, 1e-9)
    return [
        f"  tokens in   {result.tokens_in:>14,}  {result.tokens_in / wall_s:>12,.1f} per second",
        f"  tokens out  {result.tokens_out:>14,}  {result.tokens_out / wall_s:>12,.1f} per second",
    ]


def _failures(result: RunResult) -> list[str]:
    def most_first(item: tuple[str, FailureKind]) -> int:
        return -item[1].count

    kinds = sorted(result.failures.items(), key=most_first)
    lines = ["Failed lines by error code:"]
    for code, kind in kinds[:SHOWN_FAILURE_CODES]:
        lines.append(f"  {kind.count:>8,}  {code}  (first: line {kind.first_line}: {kind.first_message})")
    if len(kinds) > SHOWN_FAILURE_CODES:
        rest = sum(kind.count for _, kind in kinds[SHOWN_FAILURE_CODES:])
        lines.append(f"  {rest:>8,}  with {len(kinds) - SHOWN_FAILURE_CODES} other codes; see the error file")
    return lines


def _forward(stats: EngineStats) -> list[str]:
    return [f"  forward     {stats.forward}"] if stats.forward else []


def _memory(stats: EngineStats) -> list[str]:
    """Return the peak memory of a rank's process, with its budget."""
    if not stats.peak_memory_bytes:
        return []
    budget = stats.memory_budget_bytes
    allowed = f" of {format_bytes(budget)} allowed" if budget else ""
    which = f" (the most of {len(stats.ranks)} ranks)" if stats.ranks else ""
    return [f"  peak memory {format_bytes(stats.peak_memory_bytes):>14}{allowed}{which}"]


def _computed_twice(stats: EngineStats) -> list[str]:
    again = stats.counters.get("recomputed_tokens_unplanned", 0)
    if not again:
        return []
    return [f"Warning: KV of {again:,.0f} tokens was computed a second time, which the plan does not allow."]


def _sharing(stats: EngineStats) -> list[str]:
    """Return the share of prompt tokens that were computed once for several prompts; nothing where it is 0."""
    shared = stats.counters.get("prompt_tokens_shared", 0)
    if shared <= 0:
        return []
    total = shared + stats.counters.get("prompt_tokens", 0)
    return [f"Prefix sharing: {shared / total:.1%} of {total:,.0f} prompt tokens computed once for several prompts"]


def _store(stats: EngineStats) -> list[str]:
    """Return what the host KV store was used for; nothing without one, or without suspensions and streamed steps."""
    counters = stats.counters
    suspended, streamed = counters.get("suspensions", 0), counters.get("streamed_steps", 0)
    if stats.overflow_directory or not (suspended or streamed):
        return []
    steps = counters.get("decode_groups", 0)
    return [
        f"Host KV store: {suspended:,.0f} suspensions; decode streamed in {streamed:,.0f} of {steps:,.0f} steps, "
        f"{(counters.get('decode_rows', 0) - counters.get('drafts', 0)) / max(steps, 1):,.1f} sequences a step"
    ]


def _overflow(stats: EngineStats) -> list[str]:
    """Return how often sequences outgrew their reservations, and where they waited; nothing if none did."""
    suspended, left = stats.counters.get("suspensions", 0), stats.counters.get("sequences_overflowed", 0)
    if not (stats.overflow_directory and suspended):
        return []
    num_bytes = stats.counters.get("overflow_bytes", 0)
    where = f"files of {format_bytes(num_bytes)} in {stats.overflow_directory} (--kv-store-dir)"
    moved = f"{left:,.0f} of them to {where if num_bytes else 'host memory'}" if left else "all waited on the device"
    return [f"Outgrown reservations (--admission): {suspended:,.0f} suspensions, {moved}"]


def _graphs(stats: EngineStats) -> list[str]:
    """Return how many decode steps ran as CUDA graphs; nothing where none was captured."""
    counters = stats.counters
    captured, replays = counters.get("graphs_captured", 0), counters.get("graph_replays", 0)
    if not captured:
        return []
    return [
        f"CUDA graphs of decode steps: {captured:,.0f} captured in {format_bytes(counters.get('graph_bytes', 0))}, "
        f"{replays:,.0f} replays; {counters.get('eager_steps', 0):,.0f} steps ran kernel by kernel"
    ]


def _drafts(stats: EngineStats) -> list[str]:
    """Return what drafts gave; nothing where no pass verified any."""
    counters = stats.counters
    passes, drafts = counters.get("speculative_passes", 0), counters.get("drafts", 0)
    if not passes:
        return []
    accepted, rows = counters.get("drafts_accepted", 0), counters.get("sequences_drafted_for", 0)
    return [
        f"Drafts (--speculate): in {passes:,.0f} of {counters.get('decode_groups', 0):,.0f} decode passes, "
        f"{accepted:,.0f} of {drafts:,.0f} right; {1 + accepted / max(rows, 1):.2f} tokens of a sequence in each of "
        "these passes"
    ]


def _time_table(stats: EngineStats) -> list[str]:
    total_s = sum(stats.part_s.values())
    if total_s <= 0:
        return []
    lines = ["Where the time went:"]
    for part, seconds in sorted(stats.part_s.items(), key=lambda item: -item[1]):
        if seconds / total_s >= _SHARE_SHOWN:
            lines.append(f"  {part:<12} {seconds:>10.2f} s  {100 * seconds / total_s:>5.1f}%")
    return lines


def _rank_table(stats: EngineStats) -> list[str]:
    """Return what each of several ranks did. Routed tokens are those that its experts computed."""
    if not stats.ranks:
        return []
    names = ("sequences_finished", "output_tokens", "sequences_arrived", "sequences_departed")
    rows: list[tuple[str, ...]] = [("finished", "tokens out", "moved in", "moved out", "routed tokens", "waits")]
    for rank in stats.ranks:
        counts = [f"{rank.counters.get(name, 0):,.0f}" for name in names]
        rows.append((*counts, f"{sum(rank.tokens_per_expert):,}", f"{rank.waiting_share:.1%}"))
    labels = ["", *(f"rank {number}" for number in range(len(stats.ranks)))]
    table = [f"  {label:<8}" + "".join(f"{cell:>15}" for cell in row) for label, row in zip(labels, rows, strict=True)]
    return ["By rank (waits: the time without requests, and for other ranks):", *table]


def _partitions(stats: EngineStats) -> list[str]:
    """Return how often sequences and prompts were partitioned over ranks, and what that took; nothing if none was."""
    prompts = stats.counters.get("prompts_partitioned", 0)
    lines = [f"Prompts that all ranks computed together: {prompts:,.0f}"] if prompts else []
    names = ("partitions", "replicas_made", "replica_bytes", "replication_us", "partitions_undone")
    begun, replicas, num_bytes, microseconds, undone = (stats.counters.get(name, 0) for name in names)
    if not (begun or undone):
        return lines
    given_up = f", {undone:,.0f} given up" if undone else ""
    return [
        *lines,
        f"Partitions over ranks: {begun:,.0f}{given_up}; {replicas:,.0f} replicas of {format_bytes(int(num_bytes))}, "
        f"made in {microseconds / 1e6:,.2f} s of all ranks' time",
    ]


def _experts(stats: EngineStats) -> list[str]:
    calls = stats.counters.get("expert_calls", 0)
    if calls <= 0:
        return ["Warning: the engine counted no expert call in this run."]
    rows, gemms = stats.counters.get("expert_rows", 0), stats.counters.get("expert_gemms", 0)
    lines = [
        f"Experts: {calls:,.0f} combined calls (one for each layer and group) of {rows / calls:,.1f} routed "
        f"tokens, {rows / max(gemms, 1):,.1f} tokens for each expert that had any"
    ]
    return lines + _expert_load(stats.tokens_per_expert)


def _expert_load(tokens_per_expert: Sequence[int]) -> list[str]:
    total = sum(tokens_per_expert)
    if total <= 0:
        return []
    mean = total / len(tokens_per_expert)
    most, least = max(tokens_per_expert), min(tokens_per_expert)
    return [
        f"  most loaded expert {tokens_per_expert.index(most)} ({most:,} tokens), least loaded expert "
        f"{tokens_per_expert.index(least)} ({least:,} tokens), imbalance {most / mean:.2f} (most / mean)"
    ]
