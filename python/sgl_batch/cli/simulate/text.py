"""Owns how the message of a simulation is laid out for a terminal. It has no numbers of its own."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_batch.cli.plan.durations import in_words

_WIDTH, _NAME_WIDTH = 112, 12
_BLOCKS, _COLUMNS = ".▁▂▃▄▅▆▇█", 60
_SHARE_SHOWN, _PARTS = 0.01, 8


def text(message: Mapping[str, Any]) -> str:
    """Return the message of a simulation for a terminal."""
    lines = _head(message)
    for one in message.get("calibration", []):
        lines += _row("calibrated", _calibration(one))
    lines += ["", *_compared(message["policies"])]
    for one in message["policies"]:
        lines += ["", one["title"]]
        lines += _details(one) if "seconds" in one else _row("", f"does not run: {one['why']}")
    if "plot" in message:
        lines += ["", *_row("plot", message["plot"])]
    return "\n".join(lines) + "\n"


def _head(message: Mapping[str, Any]) -> list[str]:
    work = message["workload"]
    spread = f", lengths with a standard deviation of {work['cv']:.0%} of their means" if work["cv"] else ""
    until = f", until {in_words(message['until_s'])}" if message.get("until_s") else ""
    return [
        *_row("model", f"{message['model']['title']} ({message['model']['source']})"),
        *_row("hardware", message["hardware"]["text"]),
        *_row(
            "workload",
            f"{work['requests']:,} requests, {work['prompt_tokens']:,} prompt and {work['output_tokens']:,} output "
            f"tokens, the longest {work['longest']:,}{spread}{until}",
        ),
        *_sources(message["policies"]),
    ]


def _compared(policies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of policies."""
    header = ("policy", "time", "interval", "of the first", "interval", "tokens/s", "idle", "ended")
    rows = [header]
    has_ratios = any("ratio" in one for one in policies)
    for one in policies:
        if "seconds" not in one:
            rows.append((one["title"], "-", "", "", "", "", "", ""))
            continue
        mark = " *" if one.get("interval", {}).get("flips") else ""
        ends = one.get("interval")
        rows.append(
            (
                one["title"],
                in_words(one["seconds"]) + mark,
                f"{in_words(ends['low_s'])} to {in_words(ends['high_s'])}" if ends else "",
                f"{one['ratio']:.2f}" if "ratio" in one else "1" if has_ratios else "",
                "{:.2f} to {:.2f}".format(*one["ratio_interval"]) if "ratio_interval" in one else "",
                f"{one['tokens_per_s']:,.0f}",
                f"{one['idle']:.0%}",
                f"{one['counts']['finished']:,}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    shown = [column for column, width in enumerate(widths) if any(row[column] for row in rows[1:])]
    lines = [
        "  ".join(
            row[column].ljust(widths[column]) if column == 0 else row[column].rjust(widths[column]) for column in shown
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _details(one: Mapping[str, Any]) -> list[str]:
    total, counts = max(one["seconds"], 1e-9), one["counts"]
    parts = list(one["parts_s"].items())
    shown = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts[:_PARTS])
    bounds = ", ".join(
        f"{name} {seconds / total:.0%}" for name, seconds in one["bounds_s"].items() if seconds > _SHARE_SHOWN * total
    )
    lines = [
        *_row("run as", f"{one['setup']}; the best of {one['compared']}"),
        *_row("", f"{one['steps']:,} steps of {one['mean_rows']:,.0f} sequences on average"),
        *_row("by part", shown),
        *_row("bounds", bounds),
        *_timeline(one),
    ]
    lines += _row("counts", _counts(counts))
    if one["partitioned"]:
        last = one["partitioned"]
        lines += _row(
            "partitioned",
            f"{last['sequences']:,} sequences after {in_words(last['at_s'])}, over sets of {last['ranks']} GPUs",
        )
    for name, key in (("ratios", "table"), ("forms of KV", "forms")):
        for index, other in enumerate(one.get(key, [])):
            said = f"{other['text']}: {in_words(other['seconds'])}, idle {other['idle']:.0%}"
            lines += _row("" if index else name, said)
    if "interval" in one:
        lines += _interval(one["interval"])
    for note in one["notes"]:
        lines += _row("note", note)
    return lines


def _timeline(one: Mapping[str, Any]) -> list[str]:
    """Return rows over time: ranks that do not wait, time in which the hardware bounds, and sequences that decode."""
    line, idle = one["timeline"], one["idle"]
    most = max(line["running"], default=0)
    used = sum(line["bound"]) * line["bin_s"] / max(one["seconds"], 1e-9)
    return [
        *_row("busy", f"{_sparkline(line['busy'], 1.0)} {1 - idle:.0%}: ranks that do not wait"),
        *_row("used", f"{_sparkline(line['bound'], 1.0)} {used:.0%}: time in which memory or products bound"),
        *_row(
            "sequences", f"{_sparkline(line['running'], most)} up to {most:,.0f} run; over {in_words(one['seconds'])}"
        ),
    ]


def _sources(policies: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return where the seconds of parts are from, source by source."""
    by_source: dict[str, dict[str, None]] = {}
    for one in policies:
        for part, source in one.get("sources", {}).items():
            by_source.setdefault(source, {})[part] = None
    lines: list[str] = []
    for source, parts in by_source.items():
        lines += _row("" if lines else "sources", f"{source}: {', '.join(parts)}")
    return lines


def _counts(counts: Mapping[str, int]) -> str:
    words = [f"{counts['finished']:,} ended"]
    words += [f"{counts['refused']:,} refused: too long for the memory"] if counts["refused"] else []
    words += [f"{counts['suspensions']:,} times one gave way"] if counts["suspensions"] else []
    words += [f"{counts['again']:,} tokens computed again"] if counts["again"] else []
    words += [f"KV of {counts['moved_tokens']:,} tokens moved"] if counts["moved_tokens"] else []
    return ", ".join(words)


def _interval(interval: Mapping[str, Any]) -> list[str]:
    lines = _row("interval", interval["text"]) if "text" in interval else []
    for index, one in enumerate(interval["strongest"]):
        low, high = one["factors"]
        lines += _row(
            "assumed" if index == 0 else "",
            f"{one['name']} {one['best']:.3g} ({one['low']:.3g} to {one['high']:.3g}): time x {low:.2f} to {high:.2f}"
            f"{'; ' + one['why'] if one['why'] else ''}",
        )
    if interval["flips"]:
        lines += _row(
            "*", f"another choice is better, or this one does not fit, with these: {', '.join(interval['flips'])}"
        )
    return lines


def _calibration(one: Mapping[str, Any]) -> str:
    ratios = ", ".join(f"{name}: {ratio:.2f}" for name, ratio in one["ratios"].items())
    bound = "; no such time explains the cells" if one["is_bound"] else ""
    return (
        f"{one['policy']} on {one['gpu']}: {in_words(one['step_s'])} fixed in each pass{bound}; predicted of measured "
        f"times: {ratios}"
    )


def _sparkline(values: Sequence[float], most: float) -> str:
    """Return means of equal spans as blocks of one line."""
    if not values or most <= 0:
        return ""
    columns = min(_COLUMNS, len(values))
    means = []
    for column in range(columns):
        span = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        means.append(sum(span) / len(span))
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[min(top, max(0, round(top * mean / most)))] for mean in means)


def _row(name: str, words: str) -> list[str]:
    wrapped = textwrap.wrap(words, _WIDTH - _NAME_WIDTH - 1, break_on_hyphens=False, drop_whitespace=True) or [""]
    return [f"{name if index == 0 else '':<{_NAME_WIDTH}} {line}".rstrip() for index, line in enumerate(wrapped)]
