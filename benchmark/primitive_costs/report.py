"""Owns the table of primitives' costs: a row for each, with its share of the decode steps between two of it."""

from __future__ import annotations

from collections.abc import Sequence

from comparison.figures import Spread, spread
from comparison.report import table
from gpu_comparison.shapes import ModelShape

from primitive_costs.decode_steps import Steps
from primitive_costs.timing import Cost

# Of DeepSeek-R1 on 8 x H20, 512 sequences with a context of 10K (BatchGen, table 2).
BATCHGEN = {
    "yield, within a pass": "< 5 us",
    "yield, between passes": "< 10 us",
    "combine, without KV": "0",
    "combine, with KV": "0.2 ms a sequence and layer",
    "partition": "5-10 s, with new parallelism",
    "migrate": "overlapped",
    "scheduling at a boundary": "5-10 ms, with the exchange",
}
NOTE = """\
Median (smallest-largest) of {rounds} rounds. The share of a step counts how often an operation comes: writes to the \
buffer in every layer of each step, boundaries once in 64 steps, a full page once in as many steps as it has tokens. \
Suspending, restoring, migrating and partition come when sequences wait or move: of these it says what one takes of a \
step. Copies of KV go on beside the steps; their times are those of waiting for them at once. The step is that of the \
same context, or of the shortest where an operation knows none; its prompts share their beginning, so that it is \
rather too short than too long. BatchGen's figures are of DeepSeek-R1 on 8 x H20, 512 sequences and a context of 10K, \
and stand here for the order of magnitude. Partition is data-parallel, over ranks: this engine cuts no sequence."""


def markdown(shape: ModelShape, costs: Sequence[Cost], steps: Sequence[Steps], *, rounds: int) -> str:
    """Return the whole report."""
    head = (
        f"{shape.name}: {shape.layers} layers, {shape.hidden} channels, {shape.experts} experts, "
        f"{shape.kv_token_bytes / 1024:.0f} KiB of KV a token."
    )
    return "\n\n".join([head, _step_table(steps), _cost_table(costs, steps), NOTE.format(rounds=rounds)]) + "\n"


def _step_table(steps: Sequence[Steps]) -> str:
    if not steps:
        return "The decode step was left out."
    rows = []
    for step in steps:
        whole, between = spread(step.step_s), spread(step.between_s)
        assert whole is not None, "a step is timed at least once"
        assert between is not None, "a step is timed at least once"
        rows.append([f"{step.batch} sequences, context {step.context:,}", duration(whole), duration(between)])
    return table(["decode step", "time", "of it between passes"], rows)


def _cost_table(costs: Sequence[Cost], steps: Sequence[Steps]) -> str:
    rows = []
    for cost in costs:
        rows.append(
            [
                cost.category,
                cost.operation,
                cost.unit,
                f"{cost.context:,}" if cost.context else "",
                duration(cost.seconds),
                share(cost, steps),
                BATCHGEN.get(cost.category, ""),
            ]
        )
    return table(["primitive", "operation", "of", "context", "cost", "of a decode step", "BatchGen's"], rows)


def duration(value: Spread) -> str:
    """Return seconds in a unit that suits the median, with the spread."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value.median * factor >= 1 or unit == "us":
            scaled = Spread(
                median=value.median * factor, low=value.low * factor, high=value.high * factor, count=value.count
            )
            return f"{scaled.text(2 if scaled.median < 10 else 1)} {unit}"
    raise AssertionError("the last unit takes everything")


def share(cost: Cost, steps: Sequence[Steps]) -> str:
    """Return the operation's share of a step in percent, or if it depends on the sequences, the steps of one."""
    step = next((one for one in steps if one.context == cost.context), steps[0] if steps else None)
    if step is None:
        return ""
    part = cost.seconds.median / step.median_s
    if cost.per_step is not None:
        return f"{100 * part * cost.per_step:.2g} %"
    return f"{part:.1f} steps" if part >= 1 else f"{100 * part:.2g} % of one"
