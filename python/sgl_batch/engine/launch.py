"""Owns the start of SGLang's process tree: which of our classes run in it, and with which of SGLang's arguments."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.checkpoint.model_directory import num_experts, quantization
from sgl_batch.config import MODEL_WEIGHTS, BatchConfig, ForwardConfig, MemoryConfig
from sgl_batch.core.admission_policy import make_admission
from sgl_batch.core.topology import Topology, check_runnable
from sgl_batch.engine.process_spec import ProcessSpec
from sgl_batch.errors import ConfigError, EngineError
from sgl_batch.kernel_loader import kv_store_kernels, native_kernels
from sgl_batch.layers.moe.expert_runner import check_runner
from sgl_batch.managers.process_watch import ProcessEndedError
from sgl_batch.managers.tokenizer_manager import BatchTokenizerManager
from sgl_batch.sglang_adapter import processes
from sgl_batch.sglang_adapter.names import CPU_ATTENTION, CPU_GRAMMAR, CPU_PLATFORM, TRITON_ATTENTION
from sgl_batch.sglang_adapter.tokenizing import init_tokenizer_manager
from sgl_batch.sglang_adapter.types.messages import ServerArgs
from sgl_batch.startup.argument_checks import (
    check_activations,
    check_budgets,
    check_callbacks,
    check_ranges,
    check_weights,
)
from sgl_batch.startup.family_arguments import family_arguments
from sgl_batch.startup.gpu_arguments import chosen_arguments, machine_facts, model_facts
from sgl_batch.startup.model_checks import check_this_device
from sgl_batch.startup.quantised_arguments import activations_advice, check_streamed_form, quantised_arguments

logger = logging.getLogger(__name__)

EXPECTED_CLASSES = {
    "scheduler": "BatchScheduler",
    "tp_worker": "BatchTpWorker",
    "model_runner": "BatchModelRunner",
    "sampler": "CounterSampler",
}
EXPECTED_CPU_CLASSES = {
    "attention": "CpuPagedAttention",
    "allocator": "PageAllocator",
    "kv_pool": "DevicePagePool",
}
EXPECTED_TRITON_CLASSES = {
    "attention": "TritonAttention",
    "allocator": "PageAllocator",
    "kv_pool": "GpuPagePool",
}
# A model with latent attention has these pools instead.
EXPECTED_LATENT_CLASSES = {"DevicePagePool": "LatentPagePool", "GpuPagePool": "GpuLatentPool"}

# Our defaults on every machine: phases replace chunked prefill and the radix cache, and the loop is synchronous.
_DEFAULTS: dict[str, object] = {
    "chunked_prefill_size": -1,
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    # A window limits which KV is read, not which KV is kept: one pool holds the KV of all layers.
    "disable_hybrid_swa_memory": True,
    "page_size": 64,
    "sleep_on_idle": True,
    "skip_server_warmup": True,
}
_CPU_DEFAULTS: dict[str, object] = {
    "device": "cpu",
    "attention_backend": CPU_ATTENTION,
    "grammar_backend": CPU_GRAMMAR,
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.5,
}
# Prefill groups never run in SGLang's graphs. Capturing these would take memory and time.
_GPU_DEFAULTS: dict[str, object] = {"cuda_graph_backend_prefill": "disabled"}
_END_WITHIN_S = 60.0
_FIXED = ("chunked_prefill_size", "disable_overlap_schedule", "disable_radix_cache")


def on_cpu(kwargs: Mapping[str, object]) -> bool:
    """Return whether the engine runs without a GPU: on request, or because there is none."""
    return kwargs.get("device") == "cpu" or not torch.cuda.is_available()


def default_arguments(
    kwargs: dict[str, Any], b_moe_decode: int | None, b_moe_prefill: int | None = None
) -> dict[str, Any]:
    """Return our defaults for SGLang's arguments, on the device that `kwargs` ask for."""
    forward = BatchConfig().forward
    defaults = {**_DEFAULTS, "max_running_requests": 2 * (b_moe_decode or forward.b_moe_decode)}
    if on_cpu(kwargs):
        return {**defaults, **_CPU_DEFAULTS}
    # SGLang keeps 1.5 MB of the GPU free for each of these tokens.
    return {**defaults, **_GPU_DEFAULTS, "max_prefill_tokens": b_moe_prefill or forward.b_moe_prefill}


def sglang_arguments(kwargs: dict[str, Any], config: BatchConfig) -> dict[str, Any]:
    """Return SGLang's arguments, with our defaults where none was given. Raises ConfigError for what cannot work."""
    _check_device(kwargs.get("device"))
    check_runner(config.forward.expert_runner, on_cpu=on_cpu(kwargs))
    _check_weight_dtype(config.forward, config.memory, on_cpu=on_cpu(kwargs))
    check_activations(config.forward, config.memory)
    merged = default_arguments(kwargs, config.forward.b_moe_decode, config.forward.b_moe_prefill)
    merged.update({name: value for name, value in kwargs.items() if value is not None or name not in merged})
    for name in _FIXED:
        if merged[name] != _DEFAULTS[name]:
            raise ConfigError(
                f"{name} is {merged[name]!r}; sgl_batch schedules groups itself and needs {_DEFAULTS[name]!r}: "
                "leave it out"
            )
    if on_cpu(kwargs) and merged["attention_backend"] == TRITON_ATTENTION and not os.environ.get("TRITON_INTERPRET"):
        raise ConfigError(
            "attention_backend is 'triton', which needs a GPU: leave it out; to test a GPU's attention on a CPU, very "
            "slowly, set TRITON_INTERPRET=1 in the environment"
        )
    check_ranges(merged)
    check_this_device(merged, config, on_cpu=on_cpu(kwargs))
    if merged["page_size"] < 2:
        raise ConfigError(f"page_size is {merged['page_size']}; sgl_batch keeps KV in pages of at least 2 tokens")
    tokens = merged.get("max_total_tokens")
    if tokens is not None and tokens < merged["page_size"]:
        raise ConfigError(
            f"max_total_tokens is {tokens}, less than a page of KV, which has {merged['page_size']} tokens: raise "
            "--max-total-tokens, or lower --page-size"
        )
    check_runnable(Topology.uniform(merged.get("dp_size") or 1, num_stages=merged.get("pp_size") or 1))
    if (merged.get("nnodes") or 1) != 1:
        raise ConfigError(f"nnodes is {merged['nnodes']}; the ranks of an engine share one machine: leave nnodes out")
    if config.memory.kv_store_bytes and not on_cpu(kwargs) and merged.get("attention_backend") is None:
        merged["attention_backend"] = TRITON_ATTENTION
    overflows = make_admission(config.schedule.admission, on_cpu=on_cpu(kwargs)).grows
    _check_store(config.memory, merged.get("attention_backend"), on_cpu=on_cpu(kwargs), overflows=overflows)
    check_budgets(config.memory, on_cpu=on_cpu(kwargs), num_ranks=merged.get("dp_size") or 1)
    merged.update(_rank_arguments(merged))
    check_callbacks(config.ranks, num_ranks=merged.get("dp_size") or 1)
    _check_streaming(config, merged, on_cpu=on_cpu(kwargs))
    merged.update(family_arguments(merged, config, on_cpu=on_cpu(kwargs)))
    if config.memory.weights == "streamed" or (merged.get("dp_size") or 1) > 1:
        # A captured graph would compute with the experts of the pass in which it was captured, and without the exchange
        # with other ranks.
        _check_no_graphs(merged)
        merged["disable_cuda_graph"] = True
        # Fused, a shared expert would be one of the routed experts, which have other names and are cut between ranks.
        merged["disable_shared_experts_fusion"] = True
    merged.update(quantised_arguments(merged, on_cpu=on_cpu(kwargs)))
    merged.update(_settled(config, merged))
    _check_choices(config, merged, on_cpu=on_cpu(kwargs))
    if merged.get("speculative_algorithm"):
        raise ConfigError("speculative decoding does not work with group phases: leave speculative_algorithm out")
    return merged


def _check_device(device: object) -> None:
    """Refuse a GPU where torch finds none. Raises ConfigError."""
    if device == "cuda" and not torch.cuda.is_available():
        why = "finds none" if torch.version.cuda else "is a build for CPUs"
        raise ConfigError(
            f"device is 'cuda', which needs an NVIDIA GPU, and torch {torch.__version__} {why}: leave --device out to "
            "run on the CPU (docs/gpu.md says how to install for GPUs)"
        )


def _check_no_graphs(merged: Mapping[str, object]) -> None:
    """Refuse arguments that SGLang prefers to --disable-cuda-graph. Raises ConfigError."""
    for name in ("cuda_graph_config", "cuda_graph_backend_decode"):
        if merged.get(name) not in (None, "disabled"):
            raise ConfigError(
                f"{name} is {merged[name]!r}; with streamed weights, and on several ranks, a captured graph would "
                f"compute with experts that are no longer there or are on another rank: leave {name} out"
            )


def _settled(config: BatchConfig, merged: Mapping[str, object]) -> dict[str, object]:
    """Choose the arguments that are still open by what the machine has, and log why. Raises ConfigError."""
    model = model_facts(str(merged.get("model_path")), _text(merged, "revision"))
    choice = chosen_arguments(merged, config.forward, machine_facts(on_cpu=on_cpu(merged)), model)
    for sentence in choice.sentences:
        logger.warning("%s", sentence)
    return choice.arguments


def _text(arguments: Mapping[str, object], name: str) -> str | None:
    value = arguments.get(name)
    return None if value is None else str(value)


def _check_weight_dtype(forward: ForwardConfig, memory: MemoryConfig, *, on_cpu: bool) -> None:
    """Refuse rounded or coded weights without the native CPU kernels, which alone take them. Raises ConfigError."""
    check_weights(forward, memory, on_cpu=on_cpu)
    if forward.cpu_weight_dtype in MODEL_WEIGHTS:
        return
    asked = f"cpu_weight_dtype is {forward.cpu_weight_dtype!r}"
    if native_kernels() is None:
        raise ConfigError(f"{asked}, and the native kernels are not there: run scripts/install")
    if forward.expert_runner not in ("auto", "native"):
        raise ConfigError(f"{asked}, and expert_runner {forward.expert_runner!r} takes no such weights: choose native")


def _check_store(memory: MemoryConfig, attention: str | None, *, on_cpu: bool, overflows: bool = False) -> None:
    """Refuse what the host KV store does not work with. Raises ConfigError."""
    if memory.kv_store_bytes == 0:
        if memory.kv_store_dir is not None and not overflows:
            raise ConfigError("kv_store_dir is given without a size: give kv_store_bytes too")
        if memory.decode_kv == "streamed":
            raise ConfigError("decode_kv is 'streamed', and there is no store to stream from: give kv_store_bytes too")
        return
    if memory.decode_kv == "streamed" and memory.kv_store_mode == "exclusive":
        raise ConfigError(
            "decode_kv is 'streamed', which needs all KV in the store, and kv_store_mode is 'exclusive': choose "
            "'inclusive'"
        )
    kv_store_kernels()
    if on_cpu:
        return
    asked = f"kv_store_bytes is {memory.kv_store_bytes}"
    # Only its plans can be pointed to a prefill group's own memory.
    if attention != TRITON_ATTENTION:
        raise ConfigError(
            f"{asked} and attention_backend {attention!r}; with a GPU the host KV store works with "
            f"{TRITON_ATTENTION!r}: choose that one, or leave the store out"
        )
    for name, value in (("kv_store_dir", memory.kv_store_dir), ("kv_store_checksums", memory.kv_store_checksums)):
        if value:
            raise ConfigError(f"{asked} and {name} {value!r}; a GPU copies only to pinned memory: leave {name} out")


def _check_streaming(config: BatchConfig, merged: Mapping[str, object], *, on_cpu: bool) -> None:
    """Refuse streamed weights where files, kernels or runner cannot stream them. Raises ConfigError."""
    if config.memory.weights == "resident":
        return
    if on_cpu and native_kernels() is None:
        raise ConfigError("weights are to be streamed, and the native kernels are not there: run scripts/install")
    if on_cpu and config.forward.expert_runner not in ("auto", "native"):
        runner = config.forward.expert_runner
        raise ConfigError(
            f"weights are to be streamed, and expert_runner {runner!r} takes no streamed weights: choose native"
        )
    if merged.get("load_format") not in (None, "auto", "safetensors"):
        raise ConfigError(f"load_format is {merged['load_format']!r}; streamed weights are read from safetensors files")
    model, revision = str(merged.get("model_path")), _text(merged, "revision")
    method = _text(merged, "quantization") or quantization(model, revision)
    check_streamed_form(model, revision, config.forward, quantization=method, on_cpu=on_cpu)


def _check_choices(config: BatchConfig, merged: Mapping[str, object], *, on_cpu: bool) -> None:
    """Refuse to return routed experts on a GPU, or with a memory budget. Raises ConfigError."""
    if not merged.get("enable_return_routed_experts"):
        return
    if not on_cpu:
        raise ConfigError(
            "enable_return_routed_experts does not work on GPUs yet, whose graphs do not report the choice of "
            "experts: leave it out"
        )
    if config.memory.device_memory:
        raise ConfigError(
            f"device_memory is {format_bytes(config.memory.device_memory)}, and enable_return_routed_experts keeps 4 "
            "bytes for each token, layer and chosen expert outside it: leave one of them out"
        )


def _rank_arguments(merged: dict[str, Any]) -> dict[str, Any]:
    """Return SGLang's arguments for several ranks.

    Each rank is a scheduler of its own, with attention and KV for its own sequences. To SGLang they are data-parallel
    ranks without tensor parallelism, so that in any model only the experts are cut. The exchange between them is ours.
    """
    sizes = {name: merged.get(name) or 1 for name in ("tp_size", "dp_size", "ep_size")}
    ranks = max(sizes.values())
    if ranks == 1:
        return {}
    if set(sizes.values()) != {ranks} or not merged.get("enable_dp_attention"):
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(
            f"{given}, enable_dp_attention={bool(merged.get('enable_dp_attention'))}: several ranks have data-parallel "
            f"attention and expert-parallel experts; give --tp {ranks} --dp {ranks} --ep {ranks} --enable-dp-attention"
        )
    experts = num_experts(str(merged.get("model_path")))
    if experts is not None and experts % ranks:
        fitting = ", ".join(str(number) for number in range(1, experts + 1) if experts % number == 0)
        raise ConfigError(
            f"tp_size, dp_size and ep_size are {ranks}, and {ranks} ranks cannot share {experts} experts evenly; "
            f"choose one of {fitting}"
        )
    gpus = 0 if on_cpu(merged) else torch.cuda.device_count()
    if 0 < gpus < ranks and merged.get("max_total_tokens") is None:
        raise ConfigError(
            f"{ranks} ranks share {gpus} GPU(s), and each would take all its memory: set with --max-total-tokens how "
            "many tokens of KV each rank has, or start as many ranks as there are GPUs"
        )
    fraction = merged.get("mem_fraction_static")
    shared = {"mem_fraction_static": fraction / ranks} if fraction and on_cpu(merged) else {}
    return {"tp_size": 1, "ep_size": 1, "enable_dp_attention": False, "load_balance_method": "round_robin", **shared}


def child_platform(server_args: ServerArgs) -> str | None:
    """Return the SGLang platform of child processes, or None for SGLang's own choice."""
    return CPU_PLATFORM if server_args.device == "cpu" else None


def start_tokenizer_manager(server_args: ServerArgs, port_args: object) -> tuple[BatchTokenizerManager, object]:
    """Start our tokenizer manager with SGLang's templates, in the parent process.

    The children run already, and the wait for a child reports one that fails to start. SGLang's handler of SIGQUIT is
    replaced: its processes send that signal, and the handler would end this process too.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, lambda *_: None)
    made: tuple[BatchTokenizerManager, object] = init_tokenizer_manager(server_args, port_args, BatchTokenizerManager)
    return made


@contextmanager
def start_errors(spec: ProcessSpec) -> Iterator[None]:
    """Turn every fault of starting SGLang's process tree into EngineError, and end the children of a failed start.

    A fault that a process of `spec` reports as the user's mistake becomes ConfigError. The reason that a process has
    reported itself is preferred to how it was seen to end. Another engine in this process keeps its children, and the
    handler that notices their death.
    """
    before, handler = set(multiprocessing.active_children()), signal.getsignal(signal.SIGQUIT)
    try:
        yield
    except BaseException as error:
        children = set(multiprocessing.active_children()) - before
        started = processes.processes_of(child.pid for child in children if child.pid is not None)
        processes.end_trees(started, within_s=_END_WITHIN_S)
        for child in children:
            child.join()
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, handler)
        announce_start(spec)
        reported = spec.start_error(error)
        spec.end()
        if reported is error:
            raise
        # The process's own message is complete: this one only waited for it.
        raise reported from (None if isinstance(error, ProcessEndedError) else error)


def start_tree(server_args: ServerArgs, spec: ProcessSpec) -> tuple[processes.Launched, str]:
    """Start the process tree and verify it. Return it, and the name of the forward pass that computes the model.

    Raises EngineError. Also then the caller removes the directory of `spec`.
    """
    start_log = spec.start_log("engine's process")
    start_log.end("process begun, programs imported")
    with processes.platform(child_platform(server_args)), start_errors(spec):
        launched = processes.launch_subprocesses(
            server_args,
            init_tokenizer_manager_func=start_tokenizer_manager,
            run_scheduler_process_func=spec,
            run_detokenizer_process_func=spec.detokenizer,
        )
    running = verify(spec.infos(launched.scheduler_infos), launched.tokenizer_manager, server_args)
    start_log.end("all processes started")
    announce_start(spec)
    announce("forward", running["forward"])
    if server_args.device == "cpu" and (
        advice := activations_advice(server_args.model_path, server_args.revision, spec.config.forward)
    ):
        announce("activations", advice)
    spec.watch(launched.tokenizer_manager.note_death)
    return launched, str(running["forward"])


def announce_start(spec: ProcessSpec) -> None:
    """Log how long the phases of the start took, so far as they have ended, where that was asked for."""
    if text := spec.start_text():
        announce("start", text)


def announce(name: str, text: str) -> None:
    """Log a fact of the start, such as which forward pass computes the model, whatever SGLang's log level is."""
    logger.setLevel(logging.INFO)
    logger.info("%s: %s", name, text)


def expected_classes(server_args: ServerArgs) -> dict[str, str]:
    """Return by role the classes that must run in a scheduler. On a GPU the pools depend on the model."""
    if server_args.attention_backend != TRITON_ATTENTION:
        return {**EXPECTED_CLASSES, **(EXPECTED_CPU_CLASSES if server_args.device == "cpu" else {})}
    if server_args.device == "cpu":
        return {**EXPECTED_CLASSES, **EXPECTED_TRITON_CLASSES}
    return {**EXPECTED_CLASSES, "attention": EXPECTED_TRITON_CLASSES["attention"]}


def verify(scheduler_infos: list[dict[str, Any]], tokenizer_manager: object, server_args: ServerArgs) -> dict[str, Any]:
    """Check that our classes run in every scheduler, and return the info that the first one has published.

    Raises EngineError, which names what runs instead: SGLang logs a failed plugin and goes on without it.
    """
    expected = expected_classes(server_args)
    for info in scheduler_infos:
        running = info["classes"]
        for role, name in expected.items():
            if running.get(role) not in (name, EXPECTED_LATENT_CLASSES.get(name)):
                raise EngineError(
                    f"the scheduler process runs {running.get(role, 'an unknown class')} as its {role}, not {name}: "
                    "sgl_batch did not take effect; check that this sglang is unmodified and no other SGLang "
                    "plugin or SGLANG_PLATFORM is set"
                )
    if not isinstance(tokenizer_manager, BatchTokenizerManager):
        raise EngineError(
            f"the tokenizer manager is {type(tokenizer_manager).__name__}, not BatchTokenizerManager; "
            "leave tokenizer_worker_num at 1"
        )
    return scheduler_infos[0]
