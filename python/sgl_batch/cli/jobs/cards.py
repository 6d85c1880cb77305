"""Makes the text of jobs: rows of the table, the card of one job, the last line of a watched job. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from sgl_batch.jobs.cost import amount_text, money, per_million_text
from sgl_batch.jobs.progress_display import duration

ENDED = ("completed", "failed", "expired", "cancelled")
SHOWN_FAULTS = 10
_HEAD = ("id", "name", "status", "done/total", "failed", "lines/s", "ETA", "priority", "window", "age")
_LEFT = 3  # columns of words; the others are numbers
_NAME_CHARACTERS = 24


def counts(job: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the total, completed and failed lines; 0 where the server gives no number."""
    given = job.get("request_counts") or {}
    return int(given.get("total") or 0), int(given.get("completed") or 0), int(given.get("failed") or 0)


def extra(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields that our server adds to OpenAI's; empty for another server."""
    found = job.get("x_sgl_batch")
    return found if isinstance(found, Mapping) else {}


def name_of(job: Mapping[str, Any]) -> str:
    """Return a job's name: metadata.name, else the name of its input, with unprintable characters replaced."""
    found = (job.get("metadata") or {}).get("name") or extra(job).get("name") or "-"
    return "".join(letter if letter.isprintable() else "?" for letter in str(found))


def _cut(name: str) -> str:
    return name if len(name) <= _NAME_CHARACTERS else name[: _NAME_CHARACTERS - 3] + "..."


def exit_code(job: Mapping[str, Any]) -> int:
    """Return the exit code, as for `sgl-batch run`: 0 all lines ok, 2 some lines failed, 3 not finished."""
    if job.get("status") != "completed":
        return 3
    return 2 if counts(job)[2] else 0


def table(jobs: Iterable[Mapping[str, Any]], now: float) -> str:
    """Return a table with a row for each job; words are aligned left, numbers right.

    It has a column of costs where a job has a cost.
    """
    shown = list(jobs)
    rows = [_HEAD, *(_row(job, now) for job in shown)]
    if any("cost" in extra(job) for job in shown):
        costs = ["cost", *map(_short_cost, shown)]
        rows = [(*row, cost) for row, cost in zip(rows, costs, strict=True)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(job: Mapping[str, Any], now: float) -> tuple[str, ...]:
    total, completed, failed = counts(job)
    more = extra(job)
    rate, eta_s = more.get("lines_per_s"), more.get("eta_s")
    return (
        str(job["id"]),
        _cut(name_of(job)),
        str(job.get("status")),
        f"{completed + failed:,}/{total:,}",
        f"{failed:,}",
        "-" if rate is None else f"{rate:,.1f}",
        "-" if eta_s is None else duration(eta_s),
        str(more.get("priority", "-")),
        str(job.get("completion_window") or "-"),
        duration(max(now - float(job.get("created_at") or now), 0.0)),
    )


def _short_cost(job: Mapping[str, Any]) -> str:
    cost = extra(job).get("cost")
    if not cost:
        return "-"
    return money(cost["amount"]) + (f"/{money(cost['expected']['amount'])}" if cost.get("expected") else "")


def _cost(more: Mapping[str, Any]) -> str:
    """Return a job's cost in words; empty where no price is given."""
    if "cost" not in more:
        return ""
    cost = more["cost"]
    if not cost:
        return "unknown: the server does not say what time of its engine the job had"
    whole = cost.get("expected")
    by_plan = (more.get("expected_engine_time") or {}).get("judged_by") == "plan"
    text = amount_text(cost) + (" (by the plan)" if whole and by_plan else "")
    per_million = per_million_text(whole or cost)
    return f"{text}; {per_million}" if per_million else text


def card(job: Mapping[str, Any], now: float) -> str:
    """Return the card of one job, for a terminal."""
    total, completed, failed = counts(job)
    more = extra(job)
    percent = f" ({100 * (completed + failed) / total:.1f}%)" if total else ""
    rows: list[tuple[str, str]] = [
        ("job", f"{job['id']}"),
        ("name", name_of(job)),
        ("status", f"{job.get('status')}{_since(job, now)}"),
        ("lines", f"{completed + failed:,} of {total:,} done{percent}, {failed:,} failed"),
        *_speed(more),
        ("endpoint", f"{job.get('endpoint')}"),
        ("model", f"{job.get('model') or '-'}"),
        ("window", f"{job.get('completion_window')}, until {_time(job.get('expires_at'))}"),
        ("priority", str(more.get("priority") or "")),
        ("input", f"{job.get('input_file_id')}"),
        ("output", f"{job.get('output_file_id') or '-'}"),
        ("errors", f"{job.get('error_file_id') or '-'}"),
        *_rest(job, more),
    ]
    return "\n".join([f"{name:<10}{text}" for name, text in rows if text] + faults(job))


def faults(job: Mapping[str, Any]) -> list[str]:
    """Return why a job failed as a whole, one text for each fault in its input."""
    listed = (job.get("errors") or {}).get("data") or []
    shown = []
    for one in listed[:SHOWN_FAULTS]:
        where = f"line {one['line']}: " if one.get("line") else ""
        shown.append(f"  {where}{one.get('message')} ({one.get('code')})")
    if len(listed) > SHOWN_FAULTS:
        shown.append(f"  and {len(listed) - SHOWN_FAULTS} more")
    return shown


def last_words(job: Mapping[str, Any]) -> str:
    """Return the result of a job in one line, followed by the reasons where it failed as a whole."""
    total, completed, failed = counts(job)
    began, ended = job.get("created_at"), job.get(f"{job.get('status')}_at")
    took = f", in {duration(ended - began)}" if began and ended else ""
    missing = total - completed - failed
    unfinished = f", {missing:,} not finished" if missing > 0 else ""
    head = f"{job['id']} {job.get('status')}: {completed:,} of {total:,} lines ok, {failed:,} failed{unfinished}{took}"
    cost = _cost(extra(job))
    return "\n".join([head, *([f"cost {cost}"] if cost else []), *faults(job)])


def _speed(more: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "lines_per_s" not in more:
        return []
    rates = (
        f"{more['lines_per_s']:,.1f} lines/s, in {more.get('tokens_in_per_s', 0):,.0f} tok/s, "
        f"out {more.get('tokens_out_per_s', 0):,.0f} tok/s"
    )
    eta_s = more.get("eta_s")
    return [("speed", rates), ("ETA", "" if eta_s is None else f"{duration(eta_s)}; {more.get('window_text')}")]


def _rest(job: Mapping[str, Any], more: Mapping[str, Any]) -> list[tuple[str, str]]:
    usage, storage = job.get("usage") or {}, more.get("storage") or {}
    metadata = ", ".join(f"{key}={value}" for key, value in (job.get("metadata") or {}).items())
    return [
        (
            "tokens",
            f"{usage['input_tokens']:,} in, {usage['output_tokens']:,} out" if usage.get("total_tokens") else "",
        ),
        ("cost", _cost(more)),
        ("metadata", metadata),
        ("continues", str(more.get("continue_from") or "")),
        ("engine", "absent; the job waits for it" if more.get("engine") == "absent" else ""),
        ("storage", "" if storage.get("ok", True) else f"cannot be written: {storage.get('message')}"),
    ]


def _since(job: Mapping[str, Any], now: float) -> str:
    moment = job.get(f"{job.get('status')}_at") or job.get("created_at")
    return f", {duration(max(now - moment, 0))} ago" if moment else ""


def _time(moment: float | None) -> str:
    return "-" if moment is None else f"{datetime.fromtimestamp(moment):%Y-%m-%d %H:%M}"
