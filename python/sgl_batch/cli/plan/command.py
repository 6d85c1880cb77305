"""Runs `sgl-batch plan`: finds or makes a profile, searches a plan for a workload, and prints it. It starts no run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_batch import config as batch_config
from sgl_batch.byte_sizes import HOW_TO_WRITE
from sgl_batch.checkpoint.model_directory import cached_directory, model_config
from sgl_batch.cli.models.needs import Model, Target
from sgl_batch.cli.models.tensors import tensors_of
from sgl_batch.cli.plan.memory import CandidateMemory, remembered
from sgl_batch.cli.plan.report import MEASURED, memory_message, outcome_message, text, workload_message
from sgl_batch.cli.run.options import UsageParser
from sgl_batch.config import BatchConfig
from sgl_batch.core.model_refusals import number_type, text_part
from sgl_batch.core.supported_models import CPU, GPU
from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import RESIDENT, Candidate
from sgl_batch.planner.cost_model import fit
from sgl_batch.planner.model_layers import ModelLayers, model_layers
from sgl_batch.planner.samples import Profile, check_machine
from sgl_batch.planner.search import Allowed, kv_forms, search
from sgl_batch.planner.workload import DEFAULT, Workload, parse_lengths, parse_workload
from sgl_batch.profiler.hardware import hardware
from sgl_batch.profiler.profile import keep_profile, machine_facts, make_profile, profile_path, read_profile

FORMAT = "sgl_batch.plan/1"
_DESCRIPTION = """\
Choose the flags of `sgl-batch run` for a model, this machine and a batch: the sizes of groups and sub-batches, where KV
lies and whether weights are streamed, for the least predicted time of the whole batch.

  sgl-batch plan --model ./my-moe --profile
      measure one layer of each kind on this machine, in about a minute, keep the profile, and plan with it
  sgl-batch plan --model ./my-moe --workload 128:32x256
      for 256 requests of 128 prompt and 32 output tokens, with the profile that was kept
  sgl-batch plan --model ./my-moe --lengths lengths.txt --kv-store-bytes 8G --json
      for the lengths in a file: a line "PROMPT OUTPUT" for each request

A profile runs the engine's own code on few layers with made-up weights, so no weight is read. Close other programs
first: they make it slower than the machine is. Without a profile the engine's defaults are named, and nothing is
predicted. Each number says where it is from: measured here, fitted to the profile, or counted from the model's files.
"""
_EPILOG = """\
exit codes:
  0  there is a plan
  1  nothing fits, or bad usage
"""
_MEMORY = ("device_memory", "kv_store_bytes", "kv_store_mode", "weights", "weight_memory")
# SGLang gives weights and KV half of a CPU machine's memory where --device-memory is not given.
_CPU_SHARE = 0.5
_DISK_BYTES = 512 << 20
_PAGE_SIZE = 64


def plan_command(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        message = plan(args, batch_config.from_args(args))
    except ConfigError as error:
        sys.stderr.write(f"sgl-batch plan: error: {error}\n")
        return 1
    sys.stdout.write(json.dumps(message, indent=2) + "\n" if args.json else text(message))
    return 0 if message["plan"] is not None else 1


def _parser() -> argparse.ArgumentParser:
    parser = UsageParser(
        prog="sgl-batch plan",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", "--model-path", required=True, metavar="DIR", help="a model's directory")
    parser.add_argument("--profile", action="store_true", help="measure this machine first, and keep the profile")
    parser.add_argument("--profile-file", type=Path, metavar="FILE", help="the profile (default: in the user's cache)")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        "--workload",
        metavar="PROMPT:OUTPUTxCOUNT",
        help=f"tokens of prompts and outputs, and how many requests; several behind commas (default: {DEFAULT})",
    )
    batch.add_argument("--lengths", type=Path, metavar="FILE", help='a line "PROMPT OUTPUT" in tokens for each request')
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="as for `sgl-batch run`"
    )
    parser.add_argument("--json", action="store_true", help="print it for a program")
    memory = parser.add_argument_group("memory", f"as for `sgl-batch run`; sizes are {HOW_TO_WRITE}")
    batch_config.add_some_flags(memory, (*_MEMORY, "cpu_weight_dtype"), briefly=True)
    return parser


def plan(args: argparse.Namespace, config: BatchConfig) -> dict[str, Any]:
    """Return the plan for programs. Raises ConfigError for what the user can mend."""
    directory, workload = _directory(args.model), _workload(args)
    whole = model_config(str(directory))
    if whole is None:
        raise ConfigError(f"{directory} has no config.json that can be read; name a model's directory")
    body, dtype = text_part(whole), number_type(whole, args.dtype)
    weight_dtype = config.forward.cpu_weight_dtype
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    layers = model_layers(body, item_bytes=sizes[dtype], weight_bytes=1 if weight_dtype == "int8" else sizes[dtype])
    model = Model(config=body, tensors=tensors_of(directory, layers.num_layers), dtype=dtype)
    profile, why_none = _profile(args, directory, body, layers, dtype, weight_dtype)
    device = CPU if hardware()["gpu"] is None else GPU
    target = Target(device=device, budget=_budget(config, device), page_size=_PAGE_SIZE, length=workload.longest)
    memory = CandidateMemory(model=model, target=target, base=config)
    message = {
        "format": FORMAT,
        "model": args.model,
        "workload": workload_message(workload),
        "profile": _profile_message(profile, why_none),
    }
    if profile is None:
        found = _defaults(config, memory)
    else:
        found = outcome_message(_search(workload, profile, layers, config, memory))
    return {**message, **found, "run_flags": _run_flags(args, found)}


def _search(
    workload: Workload, profile: Profile, layers: ModelLayers, config: BatchConfig, memory: CandidateMemory
) -> Any:
    asked = config.memory
    weights = ("streamed",) if asked.weights == "streamed" else (RESIDENT,)
    if "streamed" in weights and "disk" not in profile.rates:
        raise ConfigError(
            "the profile has no rate of reading the checkpoint, which streamed weights need: measure it with --profile "
            "--weights streamed"
        )
    allowed = Allowed(
        kv=kv_forms(store_bytes=asked.kv_store_bytes, mode=asked.kv_store_mode),
        weights=weights,
        cores=int(profile.machine["cores"]),
        base=config,
    )
    return search(workload, fit(profile, layers), layers, allowed, remembered(memory))


def _defaults(config: BatchConfig, memory: CandidateMemory) -> dict[str, Any]:
    """Return the engine's own limits, with their memory: what holds where nothing was measured."""
    forward = config.forward
    default = Candidate(
        b_attn_prefill=forward.b_attn_prefill,
        b_moe_prefill=forward.b_moe_prefill,
        b_attn_decode=min(forward.b_attn_decode or forward.b_moe_decode, forward.b_moe_decode),
        b_moe_decode=forward.b_moe_decode,
        weights=config.memory.weights,
    )
    found = memory(default)
    if found.lacks:
        return {"plan": None, "why": f"the engine's defaults do not fit: {found.lacks}"}
    return {"plan": {"flags": []}, "memory": memory_message(found)}


def _run_flags(args: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    """Return all flags that a run of the plan takes: those of the plan, and those of memory that were given here."""
    given = [f"--model {args.model}"]
    given += [] if args.dtype == "auto" else [f"--dtype {args.dtype}"]
    chosen = (found.get("plan") or {}).get("flags", [])
    for name in (*_MEMORY, "cpu_weight_dtype"):
        flag, value = f"--{name.replace('_', '-')}", getattr(args, name)
        if value != batch_config.BatchConfig().flat()[name] and flag not in chosen:
            given.append(f"{flag} {value}")
    return [*given, *chosen]


def _profile(
    args: argparse.Namespace,
    directory: Path,
    body: Any,
    layers: ModelLayers,
    dtype: str,
    weight_dtype: str,
) -> tuple[Profile | None, str]:
    """Return the profile to plan with, or None and why there is none. A file that the user names must be of here."""
    path = args.profile_file or profile_path(directory, dtype=dtype, weight_dtype=weight_dtype)
    if args.profile:
        rate = _disk_rate(directory) if args.weights == "streamed" else None
        made = make_profile(directory, body, layers, dtype=dtype, weight_dtype=weight_dtype, disk_rate=rate)
        keep_profile(path, made)
        return made, ""
    found = read_profile(path)
    if found is None:
        if args.profile_file:
            raise ConfigError(f"there is no profile {path}; make one with sgl-batch plan --profile")
        return None, "none: the engine's conservative defaults hold; --profile makes one in about a minute"
    try:
        check_machine(found, machine_facts(directory, dtype=dtype, weight_dtype=weight_dtype))
    except ConfigError as error:
        if args.profile_file:
            raise
        return None, f"none, the engine's conservative defaults hold: {error}"
    return found, ""


def _profile_message(profile: Profile | None, why_none: str) -> dict[str, Any]:
    if profile is None:
        return {"source": None, "text": why_none}
    count, cores = len(profile.passes) + len(profile.steps), profile.machine["cores"]
    busy = ""
    if profile.load > cores / 2:
        busy = f"; the machine was busy then (load {profile.load:g} on {cores} cores): make it again when it is idle"
    return {
        "source": MEASURED,
        "made": profile.made,
        "samples": count,
        "load": profile.load,
        "rates": dict(profile.rates),
        "text": f"{count} samples, {MEASURED} at {profile.made} in {profile.took_s:.0f} s{busy}",
    }


def _disk_rate(directory: Path) -> float:
    from sgl_batch.cli.doctor.disk_rate import disk_rate

    files = sorted(directory.glob("*.safetensors"))
    try:
        return disk_rate(files, threads=batch_config.MemoryConfig().weight_read_threads, most_bytes=_DISK_BYTES)
    except OSError as error:
        raise ConfigError(f"the checkpoint in {directory} cannot be read past the page cache: {error}") from error


def _workload(args: argparse.Namespace) -> Workload:
    if args.lengths is None:
        return parse_workload(args.workload or DEFAULT)
    try:
        return parse_lengths(args.lengths.read_text(encoding="utf-8").splitlines(), str(args.lengths))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the lengths in {args.lengths} cannot be read: {error}") from error


def _directory(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    cached = cached_directory(name, None)
    if cached is None:
        raise ConfigError(f"there is no model directory {name}, and no model of that name in the hub's cache here")
    return cached


def _budget(config: BatchConfig, device: str) -> int:
    if config.memory.device_memory:
        return config.memory.device_memory
    if device == GPU:
        raise ConfigError("--device-memory is not given, and the memory of a GPU is not read here: name it, as in 80G")
    return int(_CPU_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
