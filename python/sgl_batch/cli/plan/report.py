"""Makes what `sgl-batch plan` says as plain data: the choice, its time and memory, and where each number is from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.cli.plan.durations import in_words
from sgl_batch.planner.candidate import NOT_IMPLEMENTED, flags_of
from sgl_batch.planner.data_sheets import DataSheet
from sgl_batch.planner.deadline import WithinDeadline
from sgl_batch.planner.feeding import feeding_s
from sgl_batch.planner.layouts import Layout, share_of
from sgl_batch.planner.schedule import Prediction
from sgl_batch.planner.search import MemoryMap, Outcome, Planned
from sgl_batch.planner.sheet_costs import ASSUMED, DATA_SHEET, Assumptions
from sgl_batch.planner.workload import Workload

MEASURED, FITTED, COUNTED = "measured here", "fitted", "counted"
# Of seconds that a data sheet and assumptions give together.
FROM_SHEET = f"{DATA_SHEET}, {ASSUMED}"
_SHOWN_PARTS = 3
_EQUAL_SHARE = 0.005


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


def hardware_message(sheet: DataSheet, gpus: int, assumed: Assumptions) -> dict[str, Any]:
    """Return the figures of a data sheet and all that is assumed beside them."""
    figures = ("memory_bytes", "memory_bytes_per_s", "bf16_flop_per_s", "fp8_flop_per_s", "pcie_bytes_per_s")
    return {
        "name": sheet.name,
        "title": sheet.title,
        "gpus": gpus,
        "figures": {name: getattr(sheet, name) for name in (*figures, "nvlink_bytes_per_s", "nvlink_gpus")},
        "source": DATA_SHEET,
        "document": sheet.source,
        "assumptions": {**assumed.listed(), "source": ASSUMED},
        "measured": None,
    }


def memory_message(memory: MemoryMap) -> dict[str, Any]:
    """Return bytes by phase and use, of one device."""
    phases = {phase: dict(uses) for phase, uses in memory.phases.items()}
    return {**phases, "kv_pages": memory.room.device, "store_pages": memory.room.store, "source": COUNTED}


def prediction_message(prediction: Prediction, source: str) -> dict[str, Any]:
    """Return a prediction's numbers."""
    whole = max(sum(prediction.bounds.values()), 1e-12)
    bounds = sorted(((name, seconds) for name, seconds in prediction.bounds.items() if seconds > 0), key=_longest)
    return {
        **prediction.as_dict(),
        "bounds_s": {name: round(seconds, 3) for name, seconds in bounds},
        "bound_shares": {name: round(seconds / whole, 4) for name, seconds in bounds},
        "bottleneck": bottleneck(prediction),
        "source": source,
    }


def _longest(named: tuple[str, float]) -> float:
    return -named[1]


def bottleneck(prediction: Prediction) -> str:
    """Return what the batch spends most of its time on."""
    return max(prediction.parts, key=prediction.parts.__getitem__)


def layout_message(layout: Layout) -> dict[str, Any]:
    """Return how the GPUs are shared out."""
    return {
        "instances": layout.instances,
        "ranks": layout.ranks,
        "tensor_parallel": layout.tensor,
        "text": layout.text(),
        **({"label": layout.label} if layout.label else {}),
    }


def instances_message(best: Planned, workload: Workload, source: str) -> dict[str, Any]:
    """Return what several instances take for a batch together: the time of one's share, and of feeding them all."""
    layout = best.layout
    feeding = feeding_s(workload.count, layout.instances)
    return {
        "count": layout.instances,
        "requests_each": share_of(workload, replace(layout, ranks=1)).count,
        "share_s": round(best.prediction.seconds, 3),
        "feeding_s": round(feeding, 3),
        "seconds": round(best.prediction.seconds + feeding, 3),
        "source": source if source == FROM_SHEET else f"{source}, {ASSUMED}",
    }


def outcome_message(outcome: Outcome, source: str) -> dict[str, Any]:
    """Return what a search found. Without a plan that fits, only why, and what is modelled only."""
    message: dict[str, Any] = {"plan": None, "why": outcome.lacks, "tried": outcome.tried}
    if outcome.ranked:
        best, *others = outcome.ranked
        message = {
            "plan": _planned(best, source),
            "memory": memory_message(best.memory),
            "tried": outcome.tried,
        }
        if others:
            message["runner_up"] = {**_planned(others[0], source), "why_it_lost": why_it_lost(best, others[0])}
    if outcome.not_implemented:
        first = outcome.not_implemented[0]
        message["not_implemented"] = {**_planned(first, source), "label": not_implemented_label(first)}
    if len(outcome.layouts) > 1:
        message["layouts"] = [_layout(*one, source) for one in outcome.layouts]
    return message


def too_large(outcome: Outcome, among: Sequence[Layout]) -> str:
    """Return that nothing fits on GPUs of a data sheet, why the smallest plan does not, and what may help."""
    largest = max((layout.ranks for layout in among if layout.is_implemented), default=1)
    ranks = "one rank" if largest == 1 else f"{largest} ranks"
    # What follows are flags that the search has lowered already.
    needs = outcome.lacks.partition("; ")[0]
    return (
        f"nothing fits, not even one instance of {ranks}: {needs}. More GPUs "
        "(--gpus) or others (--hardware), streamed experts (--weights streamed) or a host KV store (--kv-store-bytes) "
        "may help"
    )


def not_implemented_label(planned: Planned) -> str:
    """Return what of a plan is not built."""
    if not planned.layout.is_implemented:
        return planned.layout.label
    return f"{NOT_IMPLEMENTED}: two groups by turns"


def _planned(planned: Planned, source: str) -> dict[str, Any]:
    return {
        "flags": [*planned.layout.flags, *flags_of(planned.candidate.settings)],
        "layout": layout_message(planned.layout),
        **prediction_message(planned.prediction, source),
    }


def _layout(layout: Layout, best: Planned | None, lacks: str, source: str) -> dict[str, Any]:
    seconds = {"lacks": lacks} if best is None else {"seconds": round(best.prediction.seconds, 3), "source": source}
    return {**layout_message(layout), **seconds}


def why_it_lost(best: Planned, other: Planned) -> str:
    """Return in one sentence in what the other plan is worse: the parts that take longer, or its memory."""
    later = other.prediction.seconds - best.prediction.seconds
    more = other.memory.taken - best.memory.taken
    if later / max(best.prediction.seconds, 1e-9) < _EQUAL_SHARE:
        equal = "It takes the same time within half a percent"
        if other.layout.ranks > best.layout.ranks:
            return f"{equal}, with more ranks in an instance."
        return f"{equal}, and {format_bytes(more)} more memory." if more > 0 else f"{equal}, and no less memory."
    parts = {
        name: other.prediction.parts[name] - best.prediction.parts[name]
        for name in {**best.prediction.parts, **other.prediction.parts}
    }
    slower = sorted((name for name in parts if parts[name] > 0), key=lambda name: -parts[name])[:_SHOWN_PARTS]
    named = ", ".join(f"{name} by {in_words(parts[name])}" for name in slower)
    return f"It takes {in_words(later)} ({later / best.prediction.seconds:.1%}) longer: {named}."


def deadline_message(found: WithinDeadline, count: int, source: str) -> dict[str, Any]:
    """Return whether a batch of `count` requests is done in time, or how many of them are."""
    whole, deadline = in_words(found.whole_s), in_words(found.deadline_s)
    spare_s = found.deadline_s - found.whole_s
    if found.fits:
        share = spare_s / found.deadline_s
        said = f"done in {whole}, {in_words(spare_s)} ({share:.0%}) before the deadline of {deadline}"
    elif found.count:
        said = (
            f"{deadline} are too short for the whole batch, which takes {whole}; {found.count:,} of {count:,} requests "
            f"({found.count / count:.0%}) with the same mix of lengths are done in {in_words(found.count_s)}"
        )
    else:
        said = f"{deadline} are too short for even one request; the whole batch takes {whole}"
    return {
        "deadline_s": found.deadline_s,
        "fits": found.fits,
        "whole_s": round(found.whole_s, 3),
        "spare_s": round(spare_s, 3),
        "requests": found.count,
        "requests_s": round(found.count_s, 3),
        "source": source,
        "text": said,
    }
