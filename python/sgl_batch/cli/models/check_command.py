"""Runs `sgl-batch check`: whether a model would run, how, and in how much memory. It loads no weight and no engine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_batch import config_flags
from sgl_batch.byte_sizes import HOW_TO_WRITE, format_bytes
from sgl_batch.checkpoint.model_directory import ModelSource, cached_directory, is_hub_name, model_config, quantization
from sgl_batch.checkpoint.tensors import tensors_of
from sgl_batch.cli.run.options import UsageParser
from sgl_batch.config import BatchConfig
from sgl_batch.core.model_refusals import number_type, text_part
from sgl_batch.core.supported_models import CPU, DEVICES, GPU, format_of, forward_text, has_adapter
from sgl_batch.errors import ConfigError
from sgl_batch.planner.needs import Fit, Model, Target, fit, remedy
from sgl_batch.startup.argument_checks import check_budgets, check_weights
from sgl_batch.startup.fit_checks import check_asked, check_context
from sgl_batch.startup.model_checks import check_any_device, check_this_device
from sgl_batch.startup.plan_inputs import usual_budget
from sgl_batch.startup.quantised_arguments import activations_advice, check_streamed_form, may_stream

FORMAT = "sgl_batch.check/1"
_DESCRIPTION = """\
Check whether a model would run here, and print how: its forward pass, its number format, its parameters, the memory
that it takes of a device by use, and how many sequences fit on the device and in a host KV store. The command reads
only config.json and the headers of the safetensors files. It loads no weights, starts nothing, and takes a second.

  sgl-batch check --model ./my-moe
  sgl-batch check --model ./my-moe --device gpu --device-memory 80G --context-length 8192 --kv-store-bytes 200G
  sgl-batch check --model ./my-moe --device-memory 16G --weights streamed --json

Flags mean what they mean for `sgl-batch run`. Working memory is an upper bound. On a GPU, the memory of CUDA and its
libraries is an assumed reserve, because only a running process can measure it.
"""
_EPILOG = """\
exit codes:
  0  the model would run
  1  it would not run (the output gives the reason, and flags with which it would run, if there are any); or bad usage
"""
_OURS = ("b_moe_decode", "b_moe_prefill", "b_attn_prefill", "b_attn_decode", "mix_prefill", "cpu_weight_dtype")
_MEMORY = ("device_memory", "kv_store_bytes", "weights", "weight_memory")
_DTYPES = ("auto", "bfloat16", "float16", "float32")


def check_command(argv: Sequence[str]) -> int:
    """Run the command. Return its exit code."""
    args = _parser().parse_args(argv)
    try:
        _check_sizes(args)
        report = judge(args, config_flags.from_args(args))
    except ConfigError as error:
        report = {"format": FORMAT, "model": args.model, "runs": False, "why": str(error)}
    sys.stdout.write(json.dumps(report, indent=2) + "\n" if args.json else _text(report))
    return 0 if report["runs"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = UsageParser(
        prog="sgl-batch check",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        "--model-path",
        required=True,
        metavar="DIR",
        help="model directory, or the hub name of a model in the local cache",
    )
    parser.add_argument("--revision", help="revision of a model on the hub")
    parser.add_argument(
        "--device",
        choices=DEVICES,
        help="device to check for (default: gpu where this machine has an NVIDIA GPU, else cpu)",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="auto",
        help="number type of weights and KV (default: the model's; float16 where that is float32)",
    )
    parser.add_argument(
        "--context-length",
        "--max-model-len",
        dest="length",
        type=int,
        metavar="TOKENS",
        help="tokens of a sequence, prompt and output together (default: 4096, or less where the model allows less)",
    )
    parser.add_argument(
        "--page-size", type=int, default=64, metavar="TOKENS", help="tokens in one page of KV (default: 64)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with all sizes in bytes")
    config_flags.add_some_flags(parser.add_argument_group("memory", f"sizes are {HOW_TO_WRITE}"), _MEMORY, briefly=True)
    config_flags.add_some_flags(parser.add_argument_group("groups and weights"), _OURS, briefly=True)
    return parser


def judge(args: argparse.Namespace, config: BatchConfig) -> dict[str, Any]:
    """Return the report on the model, as JSON. Raises ConfigError where its config cannot be read."""
    directory, device = _directory(args.model, args.revision), args.device or _device_here()
    whole = model_config(str(directory)) or {}
    text, architecture = text_part(whole), str((whole.get("architectures") or ["?"])[0])
    forward = forward_text(architecture, has_adapter=has_adapter(architecture))
    report = {"format": FORMAT, "model": args.model, "architecture": architecture, "device": device, "forward": forward}
    asked = {"model_path": str(directory), "dtype": args.dtype, "context_length": args.length}
    check_weights(config.forward, config.memory, on_cpu=device == CPU)
    check_budgets(config.memory, on_cpu=device == CPU, num_ranks=1)
    try:
        check_any_device(ModelSource(model=str(directory), needs_tokenizer=False))
        check_this_device(asked, config, on_cpu=device == CPU)
    except ConfigError as error:
        return {**report, "forward": "refused", "runs": False, "why": str(error)}
    method, dtype = quantization(str(directory)), number_type(whole, args.dtype)
    if config.memory.weights == "streamed":
        check_streamed_form(str(directory), None, config.forward, quantization=method, on_cpu=device == CPU)
    cpu_weights = config.forward.cpu_weight_dtype if device == CPU else None
    tensors = tensors_of(directory, int(text.get("num_hidden_layers") or 0), cpu_weights=cpu_weights)
    model = Model(config=text, tensors=tensors, dtype=dtype)
    check_asked(model, config, page_size=args.page_size, here=device in (CPU, _device_here()))
    check_context(text, args.length or 0, "--context-length")
    target = Target(device=device, budget=_budget(config, device), page_size=args.page_size, length=_length(args, text))
    streamable = may_stream(str(directory), None, quantization=method, on_cpu=device == CPU)
    streamable &= any(one.is_streamable for one in tensors)
    advice = activations_advice(str(directory), None, config.forward) if device == CPU else None
    return {
        **report,
        **({} if advice is None else {"activations": advice}),
        "number_format": method or dtype,
        "status": format_of(method or dtype).on(device).status,
        **_memory(model, config, target, streamable),
    }


def _memory(model: Model, config: BatchConfig, target: Target, may_stream: bool) -> dict[str, Any]:
    int8 = target.device == CPU and config.forward.cpu_weight_dtype == "int8"
    weights = model.weight_bytes(int8=int8)
    numbers = {
        "parameters": model.parameters(),
        "weight_bytes": weights.all,
        "expert_bytes": weights.experts,
        "kv_token_bytes": model.kv_token_bytes,
        "length": target.length,
    }
    if not target.budget:
        why = "the memory of the GPU is not known here: give --device-memory, as in 80G"
        return {**numbers, "runs": False, "why": why}
    found = fit(model, config, target)
    report = {**numbers, "device_memory": target.budget, "runs": found.fits, "why": found.lacks, **_fitted(found)}
    helped = None if found.fits else remedy(model, config, target, may_stream=may_stream)
    if helped is not None:
        flags = [part for name, value in helped[0].items() for part in (f"--{name.replace('_', '-')}", str(value))]
        report |= {"flags": flags, "with_flags": _fitted(helped[1])}
    return report


def _fitted(found: Fit) -> dict[str, Any]:
    return {
        "uses": found.uses,
        "kv_bytes": found.pages or 0,
        "sequences_on_device": found.on_device,
        "sequences_in_store": found.in_store,
    }


def _check_sizes(args: argparse.Namespace) -> None:
    for flag, value in (("--page-size", args.page_size), ("--context-length", args.length)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} is {value}; it must be at least 1")


def _directory(name: str, revision: str | None) -> Path:
    """Return the directory of the model's files. Raises ConfigError for a model that is not on this machine."""
    if Path(name).exists():
        return Path(name)
    cached = cached_directory(name, revision)
    if cached is None and not is_hub_name(name):
        raise ConfigError(f"there is no directory {name}, and no model of the hub has such a name: name a directory")
    if cached is None:
        raise ConfigError(
            f"there is no directory {name}, and no model of that name in the hub's cache on this machine: download it "
            f"first (hf download {name}), or name a directory"
        )
    return cached


def _device_here() -> str:
    return GPU if Path("/dev/nvidiactl").exists() else CPU


def _budget(config: BatchConfig, device: str) -> int:
    """Return how much memory may be used: --device-memory; on a CPU by default the share of it that an engine takes."""
    if config.memory.device_memory or device == GPU:
        return config.memory.device_memory
    return usual_budget()


def _length(args: argparse.Namespace, text: Any) -> int:
    most = int(text.get("max_position_embeddings") or text.get("n_positions") or 4096)
    return int(args.length or min(most, 4096))


def _text(report: dict[str, Any]) -> str:
    """Return the report as text for a terminal."""
    lines = _how(report) + (_sizes(report) if "parameters" in report else [])
    table = "".join(f"{name:<12} {text}\n" for name, text in lines)
    if report["runs"]:
        return f"{table}\nIt would run.\n"
    verdict = f"It would not run: {report['why']}.\n"
    if "flags" in report:
        verdict += f"It would with {' '.join(report['flags'])}: {_sequences(report['with_flags'], report['length'])}.\n"
    return f"{table}\n{verdict}" if table else verdict


def _how(report: dict[str, Any]) -> list[tuple[str, str]]:
    if "architecture" not in report:
        return []
    number_format = f", {report['number_format']}" if "number_format" in report else ""
    status = f": {report['status']}" if "status" in report else ""
    lines = [
        ("model", f"{report['model']}: {report['architecture']}{number_format}"),
        ("forward", report["forward"]),
        ("device", f"{report['device']}{status}"),
    ]
    return [*lines, ("activations", report["activations"])] if "activations" in report else lines


def _sizes(report: dict[str, Any]) -> list[tuple[str, str]]:
    count, of_weights = report["parameters"], ""
    of_all = f", a token goes through {count['active']:,}" if count["experts"] else ""
    if count["experts"]:
        of_weights = f", {format_bytes(report['expert_bytes'])} of them routed experts'"
    lines = [
        ("parameters", f"{count['total']:,}{of_all}"),
        ("weights", f"{format_bytes(report['weight_bytes'])}{of_weights}"),
        ("KV", f"{format_bytes(report['kv_token_bytes'])} a token"),
    ]
    if "uses" not in report:
        return lines
    uses = ", ".join(f"{name} {format_bytes(size)}" for name, size in report["uses"].items() if size)
    memory = f"{format_bytes(report['device_memory'])}: {uses}, pages of KV {format_bytes(report['kv_bytes'])}"
    return [*lines, ("memory", memory), ("sequences", _sequences(report, report["length"]))]


def _sequences(report: dict[str, Any], length: int) -> str:
    store = f", {report['sequences_in_store']:,} in the host KV store" if report["sequences_in_store"] else ""
    return f"of {length:,} tokens {report['sequences_on_device']:,} fit on the device{store}"
