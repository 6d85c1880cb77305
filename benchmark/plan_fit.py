#!/usr/bin/env python
"""Measures how well the planner's fitted forms say the seconds of sizes that were not profiled.

Every third size of a profile is held back, the rest is fitted, and the passes of the sizes held back are predicted:
their attention, router and experts together, and each part. The ends of the grid are never held back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from comparison.kept_profile import kept_profile
from comparison.terminal import exit_code

from sgl_batch.planner.cost_model import CostModel, fit, looked_at
from sgl_batch.planner.model_layers import ModelLayers
from sgl_batch.planner.samples import PassSample, Profile

PARTS = ("layers", "attention", "router", "experts")
# Below this share of the pass, an error in a part does not matter.
_LEAST_SHARE = 0.05


def held_back(profile: Profile, first: int) -> set[tuple[bool, int]]:
    """Every third number of rows of each phase, from the `first` on, without the smallest and the largest."""
    back: set[tuple[bool, int]] = set()
    for decode in (True, False):
        rows = sorted({sample.rows for sample in profile.passes if sample.decode is decode})
        back |= {(decode, one) for one in rows[1:-1][first::3]}
    return back


def predicted(costs: CostModel, sample: PassSample) -> dict[str, float]:
    """Seconds of a sample's parts by the cost model."""
    attention = costs.decode_attention if sample.decode else costs.prefill_attention
    parts = {
        "attention": costs.pass_s + sample.layers * attention.at(sample.rows, looked_at(sample)),
        "router": sample.layers * costs.router[sample.kind].at(sample.rows),
        "experts": sample.layers * costs.experts[sample.kind].at(sample.rows),
    }
    return {**parts, "layers": sum(parts.values())}


def errors(profile: Profile, model: ModelLayers) -> dict[str, list[tuple[float, PassSample]]]:
    """Relative errors by part of all sizes, each held back in one of three fits; the whole passes among them."""
    found: dict[str, list[tuple[float, PassSample]]] = {part: [] for part in PARTS}
    for first in range(3):
        back = held_back(profile, first)
        kept = replace(profile, passes=tuple(one for one in profile.passes if (one.decode, one.rows) not in back))
        costs = fit(kept, model)
        for sample in profile.passes:
            if (sample.decode, sample.rows) not in back:
                continue
            measured = {"attention": sample.attention_s, "router": sample.router_s, "experts": sample.experts_s}
            measured["layers"] = sum(measured.values())
            for part, seconds in predicted(costs, sample).items():
                if measured[part] > _LEAST_SHARE * measured["layers"]:
                    found[part].append((seconds / measured[part] - 1, sample))
    return found


def table(found: dict[str, list[tuple[float, PassSample]]]) -> str:
    """The errors as a table in Markdown, and the worst passes."""
    lines = ["| part | passes | median error | p90 | worst |", "| --- | ---: | ---: | ---: | ---: |"]
    for part, pairs in found.items():
        sizes = sorted(abs(error) for error, _ in pairs)
        if sizes:
            median, p90 = sizes[len(sizes) // 2], sizes[min(int(0.9 * len(sizes)), len(sizes) - 1)]
            lines.append(f"| {part} | {len(sizes)} | {median:.1%} | {p90:.1%} | {sizes[-1]:.1%} |")
    worst = sorted(found["layers"], key=lambda pair: -abs(pair[0]))[:5]
    lines += ["", "The worst passes:"]
    for error, one in worst:
        phase = "decode" if one.decode else "prefill"
        lines.append(f"- {phase} of {one.sequences} x {one.tokens} tokens, {one.layers} layers: {error:+.1%}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Read the profile, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the model's directory")
    parser.add_argument("--profile-file", type=Path, help="(the one in the user's cache)")
    args = parser.parse_args(argv)
    profile, model = kept_profile(args.model, args.profile_file)
    print(f"{profile.made}, {profile.took_s} s, load {profile.load}; {profile.machine['processor']}")
    print(table(errors(profile, model)))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("plan_fit.py", lambda: main(sys.argv[1:])))
