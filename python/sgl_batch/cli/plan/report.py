"""Makes the texts of `sgl-batch plan`: what is chosen, what it takes, and where each number is from."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.planner.candidate import NOT_IMPLEMENTED, flags_of
from sgl_batch.planner.schedule import Prediction
from sgl_batch.planner.search import MemoryMap, Outcome, Planned
from sgl_batch.planner.workload import Workload

MEASURED, FITTED, COUNTED = "measured here", "fitted", "counted"
_SHOWN_PARTS = 3
_WIDTH = 112
_NAME_WIDTH = 12


def workload_message(workload: Workload) -> dict[str, Any]:
    """Return the workload's numbers."""
    prompts, outputs = ([getattr(one, name) for one in workload.requests] for name in ("prompt", "output"))
    return {
        "requests": workload.count,
        "prompt_tokens": sum(prompts),
        "output_tokens": sum(outputs),
        "longest": workload.longest,
        "source": COUNTED,
    }


def memory_message(memory: MemoryMap) -> dict[str, Any]:
    """Return bytes by phase and use."""
    phases = {phase: dict(uses) for phase, uses in memory.phases.items()}
    return {**phases, "kv_pages": memory.room.device, "store_pages": memory.room.store, "source": COUNTED}


def prediction_message(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction's numbers."""
    return {
        "seconds": round(prediction.seconds, 3),
        "prefill_s": round(prediction.prefill_s, 3),
        "decode_s": round(prediction.seconds - prediction.prefill_s, 3),
        "parts_s": {name: round(seconds, 3) for name, seconds in prediction.parts.items() if seconds > 0},
        "bottleneck": bottleneck(prediction),
        "decode_steps": round(prediction.steps),
        "mean_rows": round(prediction.mean_rows, 1),
        "prefill_groups": round(prediction.groups),
        "source": FITTED,
    }


def bottleneck(prediction: Prediction) -> str:
    """Return what the batch spends most of its time on."""
    return max(prediction.parts, key=prediction.parts.__getitem__)


def outcome_message(outcome: Outcome) -> dict[str, Any]:
    """Return what a search found. Without a plan that fits, only why."""
    if not outcome.ranked:
        return {"plan": None, "why": outcome.lacks, "tried": outcome.tried}
    best, *others = outcome.ranked
    message = {"plan": _planned(best), "memory": memory_message(best.memory), "tried": outcome.tried}
    if others:
        message["runner_up"] = {**_planned(others[0]), "why_it_lost": why_it_lost(best, others[0])}
    if outcome.not_implemented:
        message["not_implemented"] = {**_planned(outcome.not_implemented[0]), "label": NOT_IMPLEMENTED}
    return message


def _planned(planned: Planned) -> dict[str, Any]:
    return {"flags": flags_of(planned.candidate.settings), **prediction_message(planned.prediction)}


def why_it_lost(best: Planned, other: Planned) -> str:
    """Return in what the other candidate is worse: the parts that take longer, or its memory."""
    later = other.prediction.seconds - best.prediction.seconds
    parts = {
        name: other.prediction.parts[name] - best.prediction.parts[name]
        for name in {**best.prediction.parts, **other.prediction.parts}
    }
    share = later / max(best.prediction.seconds, 1e-9)
    more = other.memory.taken - best.memory.taken
    if share < 0.005:
        return (
            f"the same time within half a percent, and {format_bytes(more)} more memory"
            if more > 0
            else ("the same time within half a percent")
        )
    slower = sorted((name for name in parts if parts[name] > 0), key=lambda name: -parts[name])[:_SHOWN_PARTS]
    return f"{later:.2f} s ({share:.1%}) longer: " + ", ".join(f"{name} +{parts[name]:.2f} s" for name in slower)


def text(message: Mapping[str, Any]) -> str:
    """Return the message of a plan for a terminal."""
    work = message["workload"]
    rows = [
        ("model", message["model"]),
        (
            "workload",
            f"{work['requests']:,} requests, {work['prompt_tokens']:,} prompt and {work['output_tokens']:,} output "
            f"tokens, the longest {work['longest']:,} ({COUNTED})",
        ),
        ("profile", message["profile"]["text"]),
    ]
    plan = message.get("plan")
    if plan is None:
        return _table([*rows, ("plan", message["why"])])
    rows.append(("plan", " ".join(plan["flags"]) or "no flags: the engine's defaults"))
    if "seconds" in plan:
        rows += _times(message, plan, work["output_tokens"])
    rows += _memory(message["memory"])
    return _table(rows) + f"\nRun it with: sgl-batch run -i INPUT -o OUTPUT {' '.join(message['run_flags'])}\n"


def _times(message: Mapping[str, Any], plan: Mapping[str, Any], output_tokens: int) -> list[tuple[str, str]]:
    total = plan["seconds"]
    parts = sorted(plan["parts_s"].items(), key=lambda item: -item[1])
    rows = [
        (
            "time",
            f"{total:.1f} s ({FITTED}): prefill {plan['prefill_s']:.1f} s in {plan['prefill_groups']:,} groups, decode "
            f"{plan['decode_s']:.1f} s in {plan['decode_steps']:,} steps of {plan['mean_rows']:,.0f} sequences on "
            f"average; {output_tokens / max(total, 1e-9):,.0f} output tokens a second",
        ),
        ("by part", ", ".join(f"{name} {seconds:.2f} s ({seconds / total:.0%})" for name, seconds in parts)),
        ("bottleneck", plan["bottleneck"]),
    ]
    if "runner_up" in message:
        other = message["runner_up"]
        rows.append(("runner-up", f"{' '.join(other['flags'])}: {other['why_it_lost']} ({FITTED})"))
    if "not_implemented" in message:
        other = message["not_implemented"]
        what = f"{' '.join(other['flags'])}, two groups by turns: {other['seconds']:.1f} s ({other['label']})"
        rows.append(("not chosen", what))
    return rows


def _memory(memory: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for phase in ("prefill", "decode"):
        if phase in memory:
            uses = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory[phase].items() if size)
            rows.append((f"memory {phase}"[:_NAME_WIDTH], f"in {phase}: {uses} ({COUNTED})"))
    store = f", {memory['store_pages']:,} in the host KV store" if memory["store_pages"] else ""
    rows.append(("KV", f"{memory['kv_pages']:,} pages on the device{store} ({COUNTED})"))
    return [("memory" if name.startswith("memory") else name, words) for name, words in rows]


def _table(rows: list[tuple[str, str]]) -> str:
    lines = []
    for name, words in rows:
        wrapped = textwrap.wrap(words, _WIDTH - _NAME_WIDTH - 1, break_on_hyphens=False) or [""]
        lines += [f"{name if index == 0 else '':<{_NAME_WIDTH}} {line}" for index, line in enumerate(wrapped)]
    return "\n".join(lines) + "\n"
