"""Owns the least work of each case of a run, and the share of the machine's rates that it reached. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from comparison.figures import Spread, paired_ratios, spread

from gpu_comparison.cases import Case, Regime
from gpu_comparison.data_sheets import Rates
from gpu_comparison.found import Found, Visit, compared
from gpu_comparison.goals import Goal, Kind, Reached, Verdict, judge
from gpu_comparison.machine_rates import Machine
from gpu_comparison.roofline import Bound, Work, bound_of, decode_pass, expected_distinct, prefill_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A case's bound by one set of rates, and the share of it that the rounds reached."""

    rates: Rates
    bound: Bound
    share: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseBound:
    """The least work of a case's workload. `rows_said`, `distinct_counted`: measured, or else an upper estimate.

    `calls`: of the experts, in each layer of a step; `distinct`: experts of a call.

    `against`: measured rates first, then the data sheet's, where known.
    """

    work: Work
    calls: float
    rows_said: bool
    distinct: float
    distinct_counted: bool
    against: tuple[Against, ...]


def case_bound(regime: Regime, found: Found, machine: Machine, case: Case) -> CaseBound | None:
    """Return the bound of a case that has run, from its first round's counts; None for other cases."""
    ran = found.ran(case.name)
    if not ran:
        return None
    visit = ran[min(ran)]
    rows = visit.decode_rows or float(len(regime.workload.prompts))
    counted = found.distinct.get(case.name)
    # Rows beyond the counted ones may use more experts: then the bound is a little low.
    together = case.expert_rows(rows)
    distinct = expected_distinct(regime.shape, together) if counted is None else counted.mean
    calls = rows / together
    work = _work(regime, case, visit, rows=rows, distinct=distinct, calls=calls)
    against = []
    for rates in (machine.measured, machine.sheet):
        if rates is not None:
            bound = bound_of(work, rates)
            share = spread(bound.seconds / one.wall_s for one in ran.values())
            assert share is not None, "the case has run"
            against.append(Against(rates=rates, bound=bound, share=share))
    return CaseBound(
        work=work,
        calls=calls,
        rows_said=visit.decode_rows is not None,
        distinct=distinct,
        distinct_counted=counted is not None,
        against=tuple(against),
    )


def _work(regime: Regime, case: Case, visit: Visit, *, rows: float, distinct: float, calls: float) -> Work:
    workload, shape = regime.workload, regime.shape
    prompts = [len(prompt) for prompt in workload.prompts]
    decoded = workload.output_tokens - len(prompts)  # a prefill gives the first token
    context = fmean(length + (output + 1) / 2 for length, output in zip(prompts, workload.output_lens, strict=True))
    come, go = copied_bytes(regime, case, visit)
    return Work(
        prefill=prefill_pass(shape, prompts, group_tokens=case.group_tokens),
        decode=decode_pass(shape, rows=rows, context=context, distinct=distinct, times=decoded / rows, calls=calls),
        copy_in_bytes=come,
        copy_out_bytes=go,
    )


def copied_bytes(regime: Regime, case: Case, visit: Visit) -> tuple[float, float]:
    """Return the bytes that our engine had to copy from and to host memory: KV pages by its counters, and experts.

    Stock says nothing of its copies: its bound is that of the device alone.
    """
    counters, shape = visit.counters, regime.shape
    page_size: int = case.arguments.get("page_size", 64)
    page_bytes = page_size * shape.kv_token_bytes
    pages_in = counters.get("pages_restored", 0) + counters.get("pages_streamed", 0)
    pages_out = counters.get("pages_written_through", 0) + counters.get("pages_copied_to_suspend", 0)
    if "kv_store_bytes" in case.arguments and counters:
        waiting = counters.get("prompts_prefilled_on_device", 0)
        prompts = [-(-len(prompt) // page_size) for prompt in regime.workload.prompts]
        pages_out += round(sum(prompts) * max(0.0, 1 - waiting / len(prompts)))
    return pages_in * page_bytes + fetched_bytes(regime, visit), pages_out * page_bytes


def fetched_bytes(regime: Regime, visit: Visit) -> float:
    """Return the streamed experts that visits of layers needed and did not find in memory."""
    routed, kept = visit.counters.get("weights_routed", 0), visit.counters.get("weights_kept", 0)
    return float((routed - kept) * regime.shape.expert_bytes)


def ratio(regime: Regime, found: Found) -> Spread | None:
    """Return our speed relative to the best peer, paired by round; None if they share no round."""
    ours, best = compared(regime, found)
    if ours is None or best is None:
        return None
    walls = [{number: visit.wall_s for number, visit in found.ran(case.name).items()} for case in (best, ours)]
    return paired_ratios(walls[0], walls[1])


def copy_share(regime: Regime, found: Found, machine: Machine) -> Spread | None:
    """Return the share of our time that fetching the needed experts takes at the measured copy rate."""
    ours, rates = compared(regime, found)[0], machine.measured
    if ours is None or rates is None or rates.copy_in_bytes_per_s is None:
        return None
    rate = rates.copy_in_bytes_per_s
    return spread(fetched_bytes(regime, visit) / rate / visit.wall_s for visit in found.ran(ours.name).values())


def verdicts(regime: Regime, found: Found, machine: Machine, *, is_tiny: bool) -> list[Verdict]:
    """Judge every goal of a regime."""
    return [_verdict(goal, regime, found, machine, is_tiny=is_tiny) for goal in regime.goals]


def _verdict(goal: Goal, regime: Regime, found: Found, machine: Machine, *, is_tiny: bool) -> Verdict:
    ours, best = compared(regime, found)
    if goal.kind is Kind.COPY_BOUND:
        measured = copy_share(regime, found, machine)
        fault = "not run" if ours is None else "no copy rate was measured between host and device"
    else:
        measured = ratio(regime, found)
        missing = [text for text, case in (("ours", ours), ("stock", best)) if case is None]
        fault = f"not run: no visit of {' and of '.join(missing) or 'both in one round'} has ended well"
    bound = None if ours is None else case_bound(regime, found, machine, ours)
    reached = None
    if bound is not None and bound.against:
        first = bound.against[0]
        reached = Reached(share=first.share.median, resource=first.bound.resource)
    return judge(goal, measured, reached, is_tiny=is_tiny, fault=fault)
