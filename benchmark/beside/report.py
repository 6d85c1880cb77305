"""Owns what was found of all cases, and how it is printed: coverage, reasons, ratios of passes and of whole batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from comparison.report import table

from beside.cases import Case
from beside.figures import Compared, pass_table, ratio_table, spread_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Seconds of a batch in which `count` sequences of a rank start together: prompts and steps there, all of ours."""

    case: Case
    prompt: int
    output: int
    count: int
    their_prompts: float
    their_steps: float
    ours: float

    @property
    def ratio(self) -> float:
        """Return our seconds divided by theirs."""
        return self.ours / (self.their_prompts + self.their_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Whether a case has a prediction. `lacks`, `ours_lacks`: why AIConfigurator, or the simulator, has none."""

    case: Case
    version: str = ""
    lacks: str = ""
    ours_lacks: str = ""


@dataclass(slots=True)
class Findings:
    """All that was found so far."""

    coverage: list[Coverage] = field(default_factory=list)
    passes: list[Compared] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)


def coverage_table(found: Sequence[Coverage]) -> str:
    """Return how many cases of each model and GPU AIConfigurator predicts, of how many."""
    models = list(dict.fromkeys(one.case.model for one in found))
    gpus = list(dict.fromkeys(one.case.gpu for one in found))
    rows = []
    for model in models:
        cells = []
        for gpu in gpus:
            here = [one for one in found if (one.case.model, one.case.gpu) == (model, gpu)]
            cells.append(f"{sum(not one.lacks for one in here)} of {len(here)}" if here else "-")
        rows.append([model, *cells])
    return table(["covered", *gpus], rows)


def reasons(found: Sequence[Coverage]) -> list[str]:
    """Return why cases have no prediction, with how many of each model and GPU, the most first."""
    theirs = Counter(f"{one.case.model} on {one.case.gpu}: {one.lacks}" for one in found if one.lacks)
    ours = Counter("not compared: " + one.ours_lacks for one in found if one.ours_lacks and not one.lacks)
    return [f"{count} x {text}" for text, count in [*theirs.most_common(), *ours.most_common()]]


def batch_table(found: Sequence[Batch]) -> str:
    """Return medians and ranges of our seconds of whole batches divided by theirs, by layout and workload."""
    keys = sorted({(one.case.layout, one.prompt, one.output) for one in found})
    rows = []
    for layout, prompt, output in keys:
        here = [one for one in found if (one.case.layout, one.prompt, one.output) == (layout, prompt, output)]
        rows.append([f"{layout}, {prompt}:{output}", str(len(here)), spread_text([one.ratio for one in here])])
    return table(["whole batches", "batches", "ours / theirs"], rows)


def report(found: Findings, *, every: bool) -> str:
    """Return all tables as Markdown. `every`: each pass and batch as well."""
    sections = [coverage_table(found.coverage), *reasons(found.coverage)]
    if found.passes:
        near = [one for one in found.passes if one.case.gpus == min(other.case.gpus for other in found.passes)]
        sections += ["Our seconds of a pass divided by AIConfigurator's: median (lowest-highest)."]
        sections += [ratio_table(found.passes, ["gpus", "layout"])]
        sections += [ratio_table(found.passes, ["gpus", "layout", "module"])]
        sections += [ratio_table(near, ["gpu"]), ratio_table(near, ["model"]), ratio_table(near, ["engine"])]
    if found.batches:
        sections += [batch_table(found.batches)]
    if every:
        sections += [pass_table(found.passes)]
        rows = [
            [f"{one.case.text()}, {one.count} of {one.prompt}:{one.output}", *_batch_cells(one)]
            for one in found.batches
        ]
        sections += [table(["whole batch", "prompts there s", "steps there s", "ours s", "ours / theirs"], rows)]
    return "\n\n".join(sections)


def _batch_cells(one: Batch) -> list[str]:
    return [f"{value:.1f}" for value in (one.their_prompts, one.their_steps, one.ours)] + [f"{one.ratio:.2f}"]
