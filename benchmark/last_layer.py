#!/usr/bin/env python
"""Measures groups of prompts whose last layer computes the read tokens alone, and all tokens: one model, by turns.

Of a prompt the head reads the last token alone (model_executor/last_rows.py). Each group is a forward pass in this
process, with the engine's own runner and threads; the time is that of the pass up to its logits, which are compared.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from comparison import machine
from comparison.figures import spread
from comparison.terminal import exit_code, say
from comparison.workload import model_config

from sgl_batch.errors import ConfigError
from sgl_batch.profiler.grid import GroupSize
from sgl_batch.sglang_adapter.child_processes import THREAD_ENVIRONMENT
from sgl_batch.sglang_adapter.names import CPU_PLATFORM

PAGE = 64


def size(text: str) -> tuple[int, int]:
    """Return the prompts and the tokens of each of "64x128"."""
    prompts, _, tokens = text.partition("x")
    try:
        found = int(prompts), int(tokens)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not PROMPTSxTOKENS, as 64x128") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text} has a number below 1")
    return found


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the model's directory")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--groups",
        type=size,
        nargs="+",
        default=[(64, 128), (32, 128), (8, 512), (4, 2048)],
        metavar="PROMPTSxTOKENS",
        help="groups of prompts (64x128 32x128 8x512 4x2048)",
    )
    parser.add_argument("--rounds", type=int, default=10, help="passes of each kind (10)")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        raise ConfigError(f"--rounds is {options.rounds}; it is at least 1")
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    model_config(options.model)
    # As the engine does for its processes, before torch loads OpenMP and SGLang chooses its operators.
    os.environ |= {"SGLANG_PLATFORM": CPU_PLATFORM}
    os.environ |= {name: value for name, value in THREAD_ENVIRONMENT.items() if name not in os.environ}
    import torch

    from sgl_batch.profiler.layer_process import load
    from sgl_batch.profiler.trial_passes import TrialPasses

    pages = max(prompts * -(-tokens // PAGE) for prompts, tokens in options.groups) + 1
    rows = max(prompts for prompts, _ in options.groups)
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        server_args: dict[str, Any] = {"model_path": str(options.model), "dtype": options.dtype, "device": "cpu"}
        server_args |= {"page_size": PAGE, "max_total_tokens": pages * PAGE, "max_running_requests": rows}
        server_args |= {"log_level": "error", "skip_tokenizer_init": True}
        most = max(prompts * tokens for prompts, tokens in options.groups)
        runner = load({"config": {"b_moe_prefill": most}, "server_args": server_args, "directory": directory})
        passes = TrialPasses(runner)
        print(f"{machine.describe(machine.hardware())}; {torch.get_num_threads()} threads; {options.model.name}")
        print(f"python benchmark/last_layer.py {' '.join(argv)}\n\nMedians (smallest-largest), seconds.\n")
        print("| prompts | all tokens | read tokens | times as fast | logits |")
        print("| ---: | ---: | ---: | ---: | --- |")
        for prompts, tokens in options.groups:
            print(_row(runner, passes, prompts, tokens, options.rounds), flush=True)
    return 0


def _row(runner: Any, passes: Any, prompts: int, tokens: int, rounds: int) -> str:
    """Measure one group; return its row of the table."""
    import torch

    say(f"{prompts} prompts of {tokens} tokens")
    run = passes.prefill(GroupSize(decode=False, sequences=prompts, tokens=tokens))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    logits: dict[bool, torch.Tensor] = {}
    for number in range(rounds + 1):
        for all_rows in (True, False) if number % 2 else (False, True):
            runner.layer_runner.all_rows = all_rows
            begun = time.perf_counter()
            answer = run()
            taken_s = time.perf_counter() - begun
            logits[all_rows] = answer.logits_output.next_token_logits.clone()
            if number:  # the first one takes memory that is new
                seconds[all_rows].append(taken_s)
    ratios = [whole / read for whole, read in zip(seconds[True], seconds[False], strict=True)]
    cells = [_cell(seconds[True], 3), _cell(seconds[False], 3), _cell(ratios, 2)]
    same = "the same bits" if torch.equal(logits[True], logits[False]) else "DIFFERENT"
    return f"| {prompts} x {tokens} | {' | '.join(cells)} | {same} |"


def _cell(numbers: list[float], digits: int) -> str:
    found = spread(numbers)
    assert found is not None, "there is a round"
    return found.text(digits)


if __name__ == "__main__":
    sys.exit(exit_code("last_layer", lambda: main(sys.argv[1:])))
