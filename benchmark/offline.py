#!/usr/bin/env python
"""Owns the command that compares engines on one offline workload; comparison/ and runners/ have the rest."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from comparison import machine
from comparison.child import this_python
from comparison.cpu_bound import Rates, bound_text, least_work
from comparison.cpu_bound import as_json as bound_json
from comparison.figures import Spread, spread
from comparison.report import Record, as_json, markdown
from comparison.rounds import ENGINE_MODULES, SAMPLING_ENGINES, EngineRun, Settings, engine_of, run_rounds
from comparison.terminal import exit_code, say
from comparison.workload import (
    DEFAULT_OUTPUT_LEN,
    Workload,
    check_fits,
    jsonl_workload,
    model_config,
    random_workload,
)
from released_layers import RELEASED, make_released_layers
from runners.sglang_engines import VARIANTS

from sgl_batch.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
# Layers of the random checkpoints.
MADE = {"qwen3-moe": 12, "qwen3": 28, **{name: released.layers for name, released in RELEASED.items()}}
# What tokens are sampled by, with the least and the largest value of each.
_SAMPLING = {
    "temperature": (float, 0, 2, "sample at this temperature, each prompt from a seed of its own (0, greedy)"),
    "top_p": (float, 0, 1, "of the most probable tokens, which make up this share together (1)"),
    "top_k": (int, 1, math.inf, "of so many of the most probable tokens (all)"),
}
DESCRIPTION = """\
Measure the same offline workload through several engines, each in a fresh process, alternating round by round.

  sgl_batch                   sgl_batch.Engine
  sgl_batch_no_accumulate     the same with accumulate=False: experts called once per attention sub-batch
  sgl_batch_no_sharing        the same with share_prefixes=False: each prompt computed whole
  sgl_batch_16bit             the same with cpu_weight_dtype=model
  sgl_batch_int8              the same with cpu_weight_dtype=int8
  sgl_batch_int8_activations  the same with cpu_weight_dtype=int8 and cpu_activations=int8
  stock                       stock SGLang, on a CPU with the smallest shim that lets it start
  hf                          Hugging Face transformers, generate() over static batches
  vllm                        vLLM
  openvino                    OpenVINO GenAI, of a model in its own format: --engine-arg openvino:converted=DIR
  llamacpp                    llama.cpp, of a model in its own format: --engine-arg llamacpp:converted=FILE; at most 256
                              sequences at once, which is its limit

Engines that are not installed here run from environments of their own (--engine-env); benchmark/peers/ makes them.

Timed is the answering of all prompts; loading the model and a warm-up are not. Every engine gets the same token
ids and must return exactly the number of tokens asked for. Greedy, unless --temperature is given; no token ends an
output early.
"""
EPILOG = """\
examples:
  python benchmark/offline.py --model test/models/tiny-qwen3-moe --dtype float32 --num-prompts 4 --rounds 1
      a quick look at whether everything runs here, on a tiny model
  python benchmark/offline.py --make-model models/qwen3moe-1b
      a random Qwen3-MoE of 1.0e9 parameters (12 layers, 64 experts, top 8; 1.9 GiB), in half a minute
  python benchmark/offline.py --make-model models/qwen3-0.6b --make-model-family qwen3
      a random dense model in the shape of Qwen3-0.6B (1.2 GB)
  python benchmark/offline.py --make-model models/olmoe --make-model-family olmoe-1b-7b
      four layers of OLMoE's sizes with random weights (3.6 GB)
  python benchmark/offline.py --model models/qwen3moe-1b --num-prompts 32 --input-len 128 --output-len 32
      the comparison of docs/benchmarks.md
  python benchmark/offline.py --model DIR --num-prompts 256 --engines sgl_batch,sgl_batch_no_accumulate \\
      --engine-arg sgl_batch:b_attn_decode=32
      what accumulation gains: it can only where there are more sequences than b_attn_decode
  python benchmark/offline.py --model DIR --jsonl requests.jsonl --chat --engines sgl_batch,vllm \\
      --engine-env vllm=vllm-env/bin/python
      request lines of an OpenAI batch instead of random prompts; vLLM in an environment of its own
  python benchmark/offline.py --model DIR --engines sgl_batch,vllm,vllm-zentorch \\
      --engine-env vllm=vllm-env/bin/python --engine-env vllm-zentorch=zentorch-env/bin/python
      one engine from two environments, each under a label of its own

The tables go to standard output, progress to standard error, the JSON record and a log per run to --out.
Exit codes: 0 all engines that are installed finished, 1 bad usage, 2 an engine failed, 130 interrupted.
"""


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("what to run")
    what.add_argument("--model", type=Path, help="checkpoint directory in Hugging Face format")
    what.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="(bfloat16)")
    what.add_argument("--num-prompts", type=int, help="(32; with --jsonl, all lines)")
    what.add_argument("--input-len", type=int, default=128, help="tokens of a random prompt (128)")
    what.add_argument("--input-len-spread", type=int, default=0, help="random lengths lie within INPUT_LEN ± this (0)")
    what.add_argument(
        "--output-len", type=int, help=f"tokens to generate ({DEFAULT_OUTPUT_LEN}; with --jsonl, the lines' max_tokens)"
    )
    what.add_argument("--seed", type=int, default=0, help="of the random prompts (0)")
    what.add_argument("--jsonl", type=Path, metavar="FILE", help="OpenAI batch request lines instead of random prompts")
    for name, (kind, _, _, meaning) in _SAMPLING.items():
        what.add_argument(f"--{name.replace('_', '-')}", type=kind, help=meaning)
    what.add_argument(
        "--score-prompts", action="store_true", help="also ask for the log probability of each token of the prompts"
    )
    what.add_argument("--chat", action="store_true", help="put the prompts of --jsonl through the chat template")
    how = parser.add_argument_group("how to run it")
    how.add_argument("--engines", help="comma-separated, in this order (all that are named above or by --engine-env)")
    how.add_argument(
        "--engine-env",
        action="append",
        default=[],
        metavar="LABEL=PYTHON",
        help="interpreter of an environment that has an engine (this one); LABEL is its name, or its name, a hyphen "
        "and what tells several environments apart; repeatable",
    )
    how.add_argument("--rounds", type=int, default=3, help="(3)")
    how.add_argument(
        "--timeout-s", type=float, default=1800.0, help="limit of one engine's round, start included (1800)"
    )
    how.add_argument(
        "--full-warm-up",
        action="store_true",
        help="answer as many other prompts first: what is timed is then an engine that goes on, with memory for its KV "
        "already given by the kernel",
    )
    how.add_argument(
        "--bound",
        action="store_true",
        help="measure, before and after each round, a large product, large reads and memory that is written for the "
        "first time, and say what share of these rates each engine reached",
    )
    how.add_argument("--threads", type=int, help="OMP_NUM_THREADS of every engine (each engine's own choice)")
    how.add_argument("--hf-batch", type=int, default=32, help="prompts in a static batch of hf (32)")
    how.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="LABEL:NAME=VALUE",
        help="argument for an engine's constructor; an engine's also go to its labels, sgl_batch's to its variants; "
        "repeatable",
    )
    how.add_argument("--out", type=Path, metavar="DIR", help="for record and logs (benchmark/out/DATE-TIME)")
    make = parser.add_argument_group("a model to measure with")
    make.add_argument("--make-model", type=Path, metavar="DIR", help="write a random checkpoint, and stop")
    make.add_argument(
        "--make-model-family",
        choices=list(MADE),
        default="qwen3-moe",
        help="(qwen3-moe; qwen3 has the shape of 0.6B, the others some layers of the size of a released model's)",
    )
    make.add_argument(
        "--make-model-layers",
        type=int,
        metavar="N",
        help="(qwen3-moe: 12, 1.0e9 parameters; qwen3: 28, 0.6e9; others: as many as have some 2e9)",
    )
    make.add_argument(
        "--make-model-expert-width",
        type=int,
        default=384,
        metavar="N",
        help="channels of each of qwen3-moe's 64 experts (384)",
    )
    make.add_argument(
        "--make-model-vocabulary", type=int, metavar="N", help="tokens of a released model's layers (32000)"
    )
    return parser.parse_args(argv)


def parse_environments(texts: list[str]) -> dict[str, str]:
    """Return the interpreters by label. Raises ConfigError for an unknown engine, a repeated label, or no such file."""
    found: dict[str, str] = {}
    for text in texts:
        label, equals, python = text.partition("=")
        if not equals or engine_of(label) not in ENGINE_MODULES:
            raise ConfigError(
                f"--engine-env is {text!r}; it has the form LABEL=PYTHON, where LABEL is one of "
                f"{', '.join(ENGINE_MODULES)}, or one of them with a hyphen and a word behind it"
            )
        if label in found:
            raise ConfigError(f"--engine-env names {label} twice; give each environment a label of its own")
        if not Path(python).is_file():
            raise ConfigError(f"--engine-env {label}: {python} is not a file; name the python of its environment")
        found[label] = python
    return found


def parse_engines(text: str | None, labels: Iterable[str] = ()) -> list[str]:
    """Return the named engines in order, or all. Raises ConfigError for an unknown or repeated one.

    `labels`: those of --engine-env.
    """
    known = list(dict.fromkeys([*ENGINE_MODULES, *labels]))
    if text is None:
        return known
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(f"--engines names {name!r}; known: {', '.join(known)}; --engine-env adds labels")
        if names.count(name) > 1:
            raise ConfigError(f"--engines names {name} twice; name each engine once")
    if not names:
        raise ConfigError(f"--engines names no engine; known: {', '.join(known)}")
    return names


def parse_engine_arguments(texts: list[str], labels: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """Parse constructor arguments by engine; values are JSON if they parse as JSON, else text. Raises ConfigError.

    `labels`: those of --engine-env, which have the arguments of their engines too.
    """
    given: dict[str, dict[str, Any]] = {name: {} for name in [*ENGINE_MODULES, *labels]}
    for text in texts:
        engine, colon, setting = text.partition(":")
        name, equals, value = setting.partition("=")
        if not (colon and equals and name.isidentifier()) or engine not in given:
            raise ConfigError(
                f"--engine-arg is {text!r}; it has the form LABEL:NAME=VALUE, with one of {', '.join(given)}"
            )
        try:
            given[engine][name] = json.loads(value)
        except ValueError:
            given[engine][name] = value
    for variant in VARIANTS:
        given[variant] = {**given["sgl_batch"], **given[variant]}
    return {label: {**given[engine_of(label)], **arguments} for label, arguments in given.items()}


def build_workload(args: argparse.Namespace) -> Workload:
    """Make the prompts that the arguments describe. Raises ConfigError."""
    if args.model is None:
        raise ConfigError("--model is missing: name a checkpoint directory, or write one with --make-model DIR")
    config = model_config(args.model)
    if args.chat and args.jsonl is None:
        raise ConfigError("--chat is given without --jsonl; random prompts have no messages")
    for flag, value in (("--num-prompts", args.num_prompts), ("--output-len", args.output_len)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} is {value}; it must be at least 1")
    if args.jsonl is not None:
        workload = jsonl_workload(
            args.jsonl, args.model, chat=args.chat, num_prompts=args.num_prompts, output_len=args.output_len
        )
    else:
        workload = random_workload(
            num_prompts=args.num_prompts or 32,
            input_len=args.input_len,
            spread=args.input_len_spread,
            output_len=args.output_len or DEFAULT_OUTPUT_LEN,
            vocabulary=config["vocab_size"],
            seed=args.seed,
        )
    check_fits(workload, config)
    if args.score_prompts:
        description = f"{workload.description}, with log probabilities of the prompts"
        workload = replace(workload, scores_prompts=True, description=description)
    return workload


def parse_sampling(args: argparse.Namespace, engines: Sequence[str]) -> dict[str, float]:
    """Return what is given of temperature, top_p and top_k; nothing for greedy tokens. Raises ConfigError."""
    found = {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}
    if not found.get("temperature"):
        if found.keys() - {"temperature"}:
            raise ConfigError("--top-p and --top-k cut what is sampled: they need a --temperature above 0")
        return {}
    for name, (_, least, most, _) in _SAMPLING.items():
        if name in found and not least <= found[name] <= most:
            raise ConfigError(f"--{name.replace('_', '-')} is {found[name]:g}; it is from {least} to {most}")
    _check_engines("--temperature", engines, "can only be compared greedily here")
    return found


def _check_engines(flag: str, engines: Sequence[str], fault: str) -> None:
    others = [name for name in engines if engine_of(name) not in SAMPLING_ENGINES]
    if others:
        raise ConfigError(f"{flag}: {', '.join(others)} {fault}; --engines names those to compare")


def build_settings(args: argparse.Namespace, started: datetime) -> Settings:
    """Return the settings of every round. Raises ConfigError."""
    positive = (("--rounds", args.rounds), ("--timeout-s", args.timeout_s), ("--hf-batch", args.hf_batch))
    for flag, value in (*positive, ("--threads", args.threads)):
        if value is not None and value <= 0:
            raise ConfigError(f"{flag} is {value}; it must be more than 0")
    environments = parse_environments(args.engine_env)
    engines = parse_engines(args.engines, environments)
    if args.score_prompts:
        _check_engines("--score-prompts", engines, "are not asked for that here")
    out = args.out or ROOT / "benchmark" / "out" / f"offline-{started:%Y%m%d-%H%M%S}"
    return Settings(
        model=args.model.resolve(),
        dtype=args.dtype,
        rounds=args.rounds,
        timeout_s=args.timeout_s,
        hf_batch=args.hf_batch,
        full_warm_up=args.full_warm_up,
        sampling=parse_sampling(args, engines),
        threads=args.threads,
        python_of={name: this_python() for name in ENGINE_MODULES} | environments,
        arguments_of=parse_engine_arguments(args.engine_arg, environments),
        out=out.resolve(),
    )


def compare(args: argparse.Namespace, argv: list[str]) -> int:
    """Run the comparison, print the tables, write the record; return the exit code."""
    started = datetime.now().astimezone()
    workload, settings = build_workload(args), build_settings(args, started)
    engines = parse_engines(args.engines, settings.python_of)
    settings.out.mkdir(parents=True, exist_ok=True)
    runs: list[EngineRun] = []
    source = machine.source(ROOT)
    say(f"{workload.description}; logs in {settings.out}")
    interrupted = False
    work = least_work(args.model, workload) if args.bound else None
    rates = Rates(settings.out, args.threads)
    # Report on SIGTERM as after Ctrl-C: the engine's process is in its own session and would stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_rounds(engines, workload, settings, say, runs, rates.measure if work else lambda: None)
        if work:
            rates.measure()
    except KeyboardInterrupt:
        interrupted = True
        say("interrupted; reporting the rounds that are finished")
    record = Record(
        workload=workload,
        settings=settings,
        runs=runs,
        machine=machine.hardware(),
        source=source,
        command=["python", "benchmark/offline.py", *argv],
        started=started,
    )
    found, text = as_json(record), markdown(record)
    if work is not None and rates.measured:
        found["bound"] = bound_json(work, rates.measured)
        text += "\n" + bound_text(work, rates.measured, _walls(runs)) + "\n"
    (settings.out / "record.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    (settings.out / "report.md").write_text(text, encoding="utf-8")
    print(text, end="")
    if interrupted:
        return 130
    return 2 if any(run.fault and run.fault.startswith("failed") for run in runs) else 0


def _walls(runs: Sequence[EngineRun]) -> dict[str, Spread]:
    """Return the seconds of each engine that has finished a round."""
    found = {run.name: spread(done.wall_s for done in run.rounds) for run in runs}
    return {name: wall for name, wall in found.items() if wall is not None}


def make_model(args: argparse.Namespace) -> int:
    """Write the random checkpoint; return the exit code."""
    from random_checkpoint import make_checkpoint
    from random_dense_checkpoint import make_dense_checkpoint

    tokenizer_from = ROOT / "test" / "models" / "tiny-qwen3-moe"
    layers = MADE[args.make_model_family] if args.make_model_layers is None else args.make_model_layers
    if args.make_model_vocabulary is not None and args.make_model_family not in RELEASED:
        raise ConfigError(f"--make-model-vocabulary is for {', '.join(RELEASED)}; {args.make_model_family} has 32000")
    if args.make_model_family == "qwen3":
        parameters = make_dense_checkpoint(args.make_model, tokenizer_from, layers, say)
    elif args.make_model_family in RELEASED:
        given = args.make_model_family, args.make_model, tokenizer_from, layers
        parameters = make_released_layers(*given, vocabulary=args.make_model_vocabulary)
    else:
        width = args.make_model_expert_width
        parameters = make_checkpoint(args.make_model, tokenizer_from, layers, say, expert_width=width)
    print(f"{args.make_model}: random {args.make_model_family} of {parameters:,} parameters, bfloat16")
    return 0


def main(argv: list[str]) -> int:
    """Run the command. User errors end it with one line instead of a traceback."""
    args = parse_arguments(argv)
    return exit_code("offline.py", lambda: make_model(args) if args.make_model else compare(args, argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
