#!/usr/bin/env python
"""Measures how well the planner's fitted forms say the seconds of sizes that were not profiled.

Every third size of a profile is held back, the rest is fitted, and the passes of the sizes held back are predicted:
their attention, router and experts together, and each part. The ends of the grid are never held back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from comparison.kept_profile import kept_profile
from comparison.terminal import exit_code

from sgl_batch.planner.held_back import LAYERS, HeldBack, held_back
from sgl_batch.planner.samples import PassSample

PARTS = (LAYERS, "attention", "router", "experts")
# Below this share of the pass, an error in a part does not matter.
_LEAST_SHARE = 0.05


def errors(passes: Sequence[HeldBack]) -> dict[str, list[tuple[float, PassSample]]]:
    """Relative errors by part of all passes that were held back; the whole passes among them."""
    found: dict[str, list[tuple[float, PassSample]]] = {part: [] for part in PARTS}
    for one in passes:
        for part in PARTS:
            if one.measured[part] > _LEAST_SHARE * one.measured[LAYERS]:
                found[part].append((1 / one.ratio(part) - 1, one.sample))
    return found


def table(found: dict[str, list[tuple[float, PassSample]]]) -> str:
    """The errors as a table in Markdown, and the worst passes."""
    lines = ["| part | passes | median error | p90 | worst |", "| --- | ---: | ---: | ---: | ---: |"]
    for part, pairs in found.items():
        sizes = sorted(abs(error) for error, _ in pairs)
        if sizes:
            median, p90 = sizes[len(sizes) // 2], sizes[min(int(0.9 * len(sizes)), len(sizes) - 1)]
            lines.append(f"| {part} | {len(sizes)} | {median:.1%} | {p90:.1%} | {sizes[-1]:.1%} |")
    worst = sorted(found[LAYERS], key=lambda pair: -abs(pair[0]))[:5]
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
    print(table(errors(held_back(profile, model))))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("plan_fit.py", lambda: main(sys.argv[1:])))
