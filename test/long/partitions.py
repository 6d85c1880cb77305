"""Compares tokens of ranks that are partitioned at every other boundary with those of one rank, and prints a table.

    python test/long/partitions.py [FAMILY ...]

It covers 2 ranks, 4 ranks and sets of 2 among 4, both number types, drafts, split experts, and the admission policies.
Exit code 1: tokens differ, a sequence is not counted once, or a page is lost.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(_ROOT / "test"), str(_ROOT / "scripts")]

from integration.conftest import FAMILIES  # noqa: E402
from integration.shared_prompts import PAGE, Requests, answers, prompts_that_begin_alike  # noqa: E402
from integration.test_ranks import SAMPLED, ranks  # noqa: E402
from sgl_batch import Engine  # noqa: E402

_SMALL = {"page_size": PAGE, "boundary_tokens": 8, "b_moe_prefill": 700, "b_moe_decode": 64, "b_attn_prefill": 64}
_FEW_PAGES = {"max_total_tokens": PAGE * 60}
_STORE = {**_FEW_PAGES, "kv_store_bytes": 32 << 20, "kv_store_checksums": True}
_CASES: dict[str, dict[str, Any]] = {
    "2 ranks": ranks(2),
    "2 ranks, gloo": ranks(2, token_dispatcher="gloo"),
    "4 ranks": ranks(4),
    "2 ranks, two-page": {**ranks(2, admission="two-page"), **_FEW_PAGES},
    "2 ranks, forecast": {**ranks(2, admission="forecast"), **_FEW_PAGES},
    "4 ranks, two-page": {**ranks(4, admission="two-page"), **_FEW_PAGES},
    "2 ranks, mixed prefill": {**ranks(2), "mix_prefill": 64},
    "2 ranks, boundaries of 1": {**ranks(2), "boundary_tokens": 1},
    "2 ranks, drafts": {**ranks(2), "speculate": "3"},
    "4 ranks, drafts": {**ranks(4), "speculate": "auto"},
    "2 ranks, inclusive store": {**ranks(2, kv_store_mode="inclusive"), **_STORE},
    "2 ranks, exclusive store": {**ranks(2, kv_store_mode="exclusive"), **_STORE},
    "2 ranks, store, forecast": {**ranks(2, admission="forecast", kv_store_mode="inclusive"), **_STORE},
    "2 ranks, exclusive, two-page": {**ranks(2, admission="two-page", kv_store_mode="exclusive"), **_STORE},
    "4 ranks, store, drafts": {**ranks(4), **_STORE, "speculate": "auto"},
    "2 ranks, split experts": {**ranks(2), "partition_experts": "split", "speculate": "3"},
}
# Steps with penalties draft nothing.
_SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {**SAMPLED, "min_new_tokens": 3},
    {"temperature": 0.3, "min_new_tokens": 3},
)


def _requests(number: int, sampling: dict[str, Any]) -> Requests:
    """Return prompts that begin alike, whose outputs end at different steps."""
    made = prompts_that_begin_alike(number, random.Random(number), output_lengths=(5, 24, 60, 70))
    for seed, parameters in enumerate(made.sampling_params):
        most = parameters["max_new_tokens"]
        parameters.update({**sampling, "max_new_tokens": most, "sampling_seed": seed, "ignore_eos": False})
    return made


def _jobs() -> Iterator[Requests]:
    for number in (5, 6, 21):
        for sampling in _SAMPLING:
            yield _requests(number, sampling)


def _run(settings: dict[str, Any], expected: list[list[list[int]]]) -> str:
    """Run all jobs on one engine, and return the number of partitions, or the fault."""
    with tempfile.TemporaryDirectory() as directory:
        files = {"kv_store_dir": directory} if "admission" in settings else {}
        engine = Engine(**{**_SMALL, **settings, **files, "migration": "partition"})
        try:
            for job, tokens in zip(_jobs(), expected, strict=True):
                if answers(engine, job) != tokens:
                    return "other tokens"
            stats = engine.batch_stats()
        finally:
            engine.shutdown()
    counts = stats["counters"]
    if stats["free_pages"] != stats["total_pages"]:
        return f"{stats['free_pages']} of {stats['total_pages']} pages are free"
    if counts["sequences_finished"] != sum(map(len, expected)):
        return f"{counts['sequences_finished']} sequences counted of {sum(map(len, expected))}"
    if not counts.get("partitions"):
        return "no partition"
    if "speculate" in settings and not counts.get("drafts"):
        return "no draft"
    drafts = f", {counts['drafts_accepted']} of {counts['drafts']} drafts right" if "speculate" in settings else ""
    return f"ok, {counts['partitions']} partitions, {counts['replicas_made']} replicas{drafts}"


def main() -> int:
    """Run the families named, or all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)} (default: all)")
    families = parser.parse_args().families or list(FAMILIES)
    if unknown := set(families) - set(FAMILIES):
        parser.error(f"no family is called {sorted(unknown)[0]}: choose from {', '.join(FAMILIES)}")
    failed = False
    for family in families:
        for dtype in ("bfloat16", "float32"):
            model = {"model_path": str(_ROOT / "test" / "models" / family), "dtype": dtype, "max_total_tokens": 16384}
            alone = Engine(**{**_SMALL, **model})
            try:
                expected = [answers(alone, job) for job in _jobs()]
            finally:
                alone.shutdown()
            for case, settings in _CASES.items():
                begun = time.monotonic()
                found = _run({**model, **settings}, expected)
                failed |= not found.startswith("ok")
                seconds = time.monotonic() - begun
                sys.stdout.write(f"{family:18} | {dtype:8} | {case:26} | {found} | {seconds:.0f} s\n")
                sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
