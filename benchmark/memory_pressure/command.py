"""Owns the sub-command `pressure`: its flags, its workload and its cases."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison.workload import check_fits, model_config, random_workload

from memory_pressure.measuring import Pressure, Run, cases_of, run_rounds
from memory_pressure.report import as_json, markdown
from sgl_batch.errors import ConfigError

HELP = "many sequences on a device that holds the KV of few: host store, none, stock SGLang, and all on the device"
_KV_ITEM_BYTES = 2  # bfloat16


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this sub-command."""
    parser.add_argument("--num-prompts", type=int, default=64, help="(64)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt, plus or minus a quarter (128)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens to generate (128)")
    parser.add_argument("--pool-share", type=float, default=0.1, help="of all KV, what the device holds (0.1)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page of ours (16)")
    parser.add_argument("--boundary-tokens", type=int, default=16, help="steps from boundary to boundary (16)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts (0)")


def build(options: argparse.Namespace, out: Path) -> Pressure:
    """Return the settings of the flags. Raises ConfigError."""
    config = model_config(options.model)
    if not 0 < options.pool_share <= 1:
        raise ConfigError(f"--pool-share is {options.pool_share}; it must be more than 0 and at most 1")
    workload = random_workload(
        num_prompts=options.num_prompts,
        input_len=options.input_len,
        spread=options.input_len // 4,
        output_len=options.output_len,
        vocabulary=config["vocab_size"],
        seed=options.seed,
    )
    check_fits(workload, config)
    page = options.page_size
    lengths = [len(prompt) + output for prompt, output in zip(workload.prompts, workload.output_lens, strict=True)]
    need = sum(-(-length // page) * page for length in lengths)
    pool = int(options.pool_share * need) // page * page
    if pool < max(lengths):
        raise ConfigError(
            f"--pool-share {options.pool_share} is {pool} tokens, and the longest sequence has {max(lengths)}: raise it"
        )
    token_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * _KV_ITEM_BYTES
    ours = {"page_size": page, "boundary_tokens": options.boundary_tokens}
    return Pressure(
        model=options.model.resolve(),
        workload=workload,
        pool_tokens=pool,
        need_tokens=need,
        cases=cases_of(pool_tokens=pool, need_tokens=need, store_bytes=2 * need * token_bytes, ours=ours),
        out=out,
        timeout_s=options.timeout_s,
    )


class Measurement:
    """The rounds of one call of the command, and their report."""

    def __init__(self, options: argparse.Namespace, out: Path) -> None:
        self._pressure, self._num_rounds = build(options, out), options.rounds
        self._rounds: list[dict[str, Run]] = []

    def run(self, say: Callable[[str], None]) -> None:
        """Run all rounds. Raises EngineError if an engine fails."""
        run_rounds(self._pressure, self._num_rounds, say, self._rounds)

    def report(self) -> str:
        """Return the tables in Markdown."""
        return markdown(self._pressure, self._rounds)

    def record(self) -> dict[str, Any]:
        """Return all figures."""
        return as_json(self._pressure, self._rounds)
