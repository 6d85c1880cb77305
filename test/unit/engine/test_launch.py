"""A failed start ends what it has started, and nothing else of the process."""

from __future__ import annotations

import json
import multiprocessing
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from sgl_batch import kernel_loader
from sgl_batch.config import BatchConfig, from_mapping
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.engine import launch
from sgl_batch.engine.launch import sglang_arguments, start_errors
from sgl_batch.engine.process_spec import ProcessSpec
from sgl_batch.errors import ConfigError, EngineError
from sgl_batch.managers.failure_reporter import FailureReporter
from sgl_batch.managers.process_watch import ProcessEndedError
from sgl_batch.startup.gpu_arguments import MachineFacts

SPAWN = multiprocessing.get_context("spawn")
HOPPER = MachineFacts(capability=(9, 0), flash_attention_3=True, flashinfer=True, xgrammar=True)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test has a GPU, it is a whole Hopper."""
    facts = lambda on_cpu: replace(HOPPER, capability=None) if on_cpu else HOPPER  # noqa: E731
    monkeypatch.setattr(launch, "machine_facts", facts)


@pytest.fixture
def start_child() -> Iterator[Callable[[], BaseProcess]]:
    """Starts child processes that run until they are ended, as an engine's do."""
    children: list[BaseProcess] = []

    def start() -> BaseProcess:
        child = SPAWN.Process(target=time.sleep, args=(600,))
        child.start()
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.join()


@pytest.fixture
def spec() -> Iterator[ProcessSpec]:
    begun = ProcessSpec.begin(BatchConfig(), "spawn")
    yield begun
    begun.end()


@pytest.mark.parametrize(
    ("error", "becomes"),
    [(RuntimeError("no memory"), EngineError), (KeyboardInterrupt(), KeyboardInterrupt), (OSError(), EngineError)],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_start_that_fails_ends_its_own_children_and_no_others(error, becomes, start_child, spec):
    another = start_child()
    own = []

    def start_engine():
        with start_errors(spec):
            own.append(start_child())
            raise error

    with pytest.raises(becomes):
        start_engine()
    assert not own[0].is_alive()
    assert another.is_alive()


def test_a_start_that_succeeds_ends_no_process(start_child, spec):
    with start_errors(spec):
        child = start_child()
    assert child.is_alive()


def test_the_error_says_that_the_engine_did_not_start_why_and_where(spec, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = r"^the engine did not start: KeyError: 'eos' \(sgl_batch/engine/launch\.py:\d+\); its traceback is in (.*)$"
    with pytest.raises(EngineError, match=said) as raised, start_errors(spec):
        raise KeyError("eos")
    kept = Path(re.search(said, str(raised.value))[1])
    assert kept.parent == tmp_path
    assert kept.read_text().endswith("KeyError: 'eos'\n")


@pytest.mark.parametrize(
    ("reported", "raises", "message"),
    [
        (ConfigError("device_memory is too small"), ConfigError, r"^device_memory is too small$"),
        (EngineError("no memory is left"), EngineError, r"^the engine did not start: no memory is left$"),
    ],
)
def test_the_error_that_a_child_reported_is_raised_and_the_directory_is_removed(spec, reported, raises, message):
    def start_engine() -> None:
        with start_errors(spec):
            FailureReporter(rendezvous=Rendezvous(spec.directory), name="the scheduler").report(reported)
            raise ProcessEndedError("the scheduler failed (exit code 1)")

    with pytest.raises(raises, match=message) as raised:
        start_engine()
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    assert not spec.directory.exists()


def test_a_failed_start_restores_another_engines_signal_handler(spec):
    def handler(*_: object) -> None:
        """Another engine's."""

    def start_engine() -> None:
        with start_errors(spec):
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)
            raise RuntimeError("no memory")

    before = signal.signal(signal.SIGQUIT, handler)
    try:
        with pytest.raises(EngineError):
            start_engine()
        assert signal.getsignal(signal.SIGQUIT) is handler
    finally:
        signal.signal(signal.SIGQUIT, before)


INT8 = {"cpu_weight_dtype": "int8"}


@pytest.mark.parametrize(
    ("options", "on_cpu", "kernels", "message"),
    [
        (INT8, False, object(), "is for a CPU: leave it out, and see SGLang's --quantization"),
        (INT8, True, None, "the native kernels are not there: run scripts/install"),
        (
            {**INT8, "expert_runner": "torch"},
            True,
            object(),
            "expert_runner 'torch' takes no such weights: choose native",
        ),
    ],
)
def test_rounded_weights_are_refused_where_nothing_can_multiply_them(options, on_cpu, kernels, message, monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: on_cpu)
    monkeypatch.setattr(launch, "native_kernels", lambda: kernels)
    with pytest.raises(ConfigError, match=f"cpu_weight_dtype is 'int8'.*{message}"):
        sglang_arguments({}, from_mapping(options))


def test_coded_weights_are_refused_where_they_are_streamed(monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: True)
    monkeypatch.setattr(launch, "native_kernels", object)
    with pytest.raises(ConfigError, match=r"'lossless12', and weights are streamed; .*: leave out one of them"):
        sglang_arguments({}, from_mapping({"cpu_weight_dtype": "lossless12", "weights": "streamed"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "cpu_weight_dtype is 'auto'; int8 rows meet int8 weights: give cpu_weight_dtype 'int8' too"),
        ({**INT8, "weights": "streamed"}, "weights are streamed; .*: leave out cpu_activations or weights"),
    ],
)
def test_rows_are_not_rounded_where_no_int8_weights_meet_them(options, message, monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: True)
    monkeypatch.setattr(launch, "native_kernels", object)
    with pytest.raises(ConfigError, match=f"cpu_activations is 'int8', and {message}"):
        sglang_arguments({}, from_mapping({"cpu_activations": "int8", **options}))


@pytest.mark.parametrize(
    ("options", "on_cpu", "message"),
    [
        (
            {"kv_store_dir": "d", "admission": "reserve"},
            True,
            "kv_store_dir is given without a size: give kv_store_bytes too",
        ),
        ({"kv_store_bytes": 9, "kv_store_dir": "d"}, False, "kv_store_dir 'd'; a GPU copies only to pinned memory"),
        (
            {"kv_store_bytes": 9, "kv_store_checksums": True},
            False,
            "a GPU copies only to pinned memory: leave kv_store",
        ),
        ({"kv_store_bytes": 9}, False, "attention_backend 'fa3'; with a GPU the host KV store works with 'triton'"),
    ],
)
def test_a_store_is_refused_where_it_does_not_work(options, on_cpu, message, monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: on_cpu)
    with pytest.raises(ConfigError, match=message):
        sglang_arguments({"attention_backend": "fa3"} if "fa3" in message else {}, from_mapping(options))


def test_on_a_gpu_a_store_selects_the_attention_that_it_works_with(monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: False)
    assert sglang_arguments({}, from_mapping({"kv_store_bytes": "1G"}))["attention_backend"] == "triton"
    assert sglang_arguments({}, from_mapping({})).get("attention_backend") is None


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_store_without_the_kernels_is_refused_with_the_command_that_builds_them(on_cpu, monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: on_cpu)
    monkeypatch.setattr(kernel_loader, "native_kernels", lambda: None)
    with pytest.raises(ConfigError, match=r"--kv-store-bytes.*pip install --no-build-isolation ./sgl-kernel.; or run"):
        sglang_arguments({}, from_mapping({"kv_store_bytes": "1G"}))


def test_on_a_gpu_the_memory_that_sglang_keeps_free_follows_the_prefill_group(monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: False)
    config = from_mapping({"b_moe_prefill": 4096})
    assert sglang_arguments({}, config)["max_prefill_tokens"] == 4096
    assert sglang_arguments({"max_prefill_tokens": 9000}, config)["max_prefill_tokens"] == 9000
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: True)
    assert "max_prefill_tokens" not in sglang_arguments({}, config)


@pytest.mark.parametrize(
    ("architecture", "chosen"), [("Qwen3MoeForCausalLM", "triton"), ("Phi3ForCausalLM", None), (None, "triton")]
)
def test_what_the_machine_decides_is_logged_once_for_models_that_are_split(
    architecture, chosen, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: False)
    monkeypatch.setattr(launch, "machine_facts", lambda on_cpu: replace(HOPPER, capability=(8, 0)))
    if architecture:
        (tmp_path / "config.json").write_text(f'{{"architectures": ["{architecture}"]}}')
    with caplog.at_level("WARNING", launch.__name__):
        arguments = sglang_arguments({"model_path": str(tmp_path)}, from_mapping({"b_moe_decode": 300}))
    assert arguments.get("attention_backend") == chosen
    assert arguments["cuda_graph_max_bs_decode"] == 300
    assert [record.message.partition(",")[0] for record in caplog.records] == (
        ["attention backend: triton"] if chosen else []
    )


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {}, r"are quantised \(fp8\)"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, {}, r"are quantised \(awq\)"),
        ({}, {"quantization": "fp8"}, r"are quantised \(fp8\)"),
        ({"quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:.*experts.*"]}}, {}, None),
    ],
)
def test_streaming_quantised_weights_is_refused_before_any_is_loaded(config, arguments, words, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = {"model_path": str(tmp_path), **arguments}
    assert sglang_arguments(given, from_mapping({}))
    if words is None:
        assert sglang_arguments(given, from_mapping(STREAMED))
        return
    with pytest.raises(ConfigError, match=f"weights are to be streamed.*{words}; .* leave --weights out"):
        sglang_arguments(given, from_mapping(STREAMED))


def test_triton_attention_on_a_cpu_is_for_tests_and_says_how(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = {"device": "cpu", "attention_backend": "triton"}
    with pytest.raises(ConfigError, match=r"needs a GPU: leave it out; to test .* set TRITON_INTERPRET=1"):
        sglang_arguments(arguments, from_mapping({}))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert sglang_arguments(arguments, from_mapping({}))["attention_backend"] == "triton"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kv_store_bytes": "3G", "host_memory": "2G"},
            "kv_store_bytes is 3.00 GiB, more than host_memory .2.00 GiB. allows; lower --kv-store-bytes, raise "
            "--host-memory, or name a directory for the store .--kv-store-dir.",
        ),
        (
            {"kv_store_bytes": "900T", "device_memory": "1G"},
            "device_memory .1.00 GiB for each of 1 rank.s.. and a host KV store in memory .900.00 TiB. are more "
            "than the machine has",
        ),
        ({"device_memory": "900T"}, "rank.s.. is more than the machine has, .*; lower --device-memory$"),
    ],
)
def test_budgets_that_cannot_be_kept_are_refused_with_the_numbers(options, message, monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: True)
    with pytest.raises(ConfigError, match=message):
        sglang_arguments({}, from_mapping(options))


def test_a_store_in_a_file_takes_nothing_of_the_hosts_memory(monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: True)
    assert sglang_arguments({}, from_mapping({"kv_store_bytes": "3G", "host_memory": "2G", "kv_store_dir": "d"}))


STREAMED = {"weights": "streamed"}


@pytest.mark.parametrize(
    ("options", "arguments", "on_cpu", "kernels", "message"),
    [
        (STREAMED, {}, True, None, "the native kernels are not there: run scripts/install"),
        ({**STREAMED, "expert_runner": "torch"}, {}, True, object(), "'torch' takes no streamed weights"),
        (STREAMED, {"load_format": "dummy"}, True, object(), "load_format is 'dummy'; .* from safetensors files"),
        (STREAMED, {"load_format": "pt"}, True, object(), "load_format is 'pt'; .* from safetensors files"),
        ({"weight_memory": 9}, {}, True, object(), "weights are resident: give --weights streamed too"),
    ],
)
def test_streamed_weights_are_refused_where_nothing_can_read_or_use_them(
    options, arguments, on_cpu, kernels, message, monkeypatch
):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: on_cpu)
    monkeypatch.setattr(launch, "native_kernels", lambda: kernels)
    with pytest.raises(ConfigError, match=message):
        sglang_arguments(arguments, from_mapping(options))


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_weights_are_streamed_from_safetensors_files_on_a_cpu(load_format, monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: True)
    monkeypatch.setattr(launch, "native_kernels", object)
    arguments = sglang_arguments({"load_format": load_format}, from_mapping(STREAMED))
    assert arguments["load_format"] == load_format


def test_weights_are_streamed_to_a_gpu_without_captured_graphs(monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: False)
    monkeypatch.setattr(launch, "native_kernels", lambda: None)
    assert sglang_arguments({}, from_mapping(STREAMED))["disable_cuda_graph"] is True
    assert not sglang_arguments({}, from_mapping({})).get("disable_cuda_graph")
    for name in ("cuda_graph_backend_decode", "cuda_graph_config"):
        with pytest.raises(ConfigError, match=f"{name} is 'full'; with streamed weights.*: leave {name} out"):
            sglang_arguments({name: "full"}, from_mapping(STREAMED))


def test_ranks_that_exchange_rows_capture_no_graphs_of_sglang_s_forward(monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: False)
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 2)
    two = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True}
    assert sglang_arguments(two, from_mapping({}))["disable_cuda_graph"] is True


@pytest.mark.parametrize(
    ("options", "on_cpu", "message"),
    [
        ({}, False, "enable_return_routed_experts does not work on GPUs yet"),
        ({"device_memory": "1G"}, True, "device_memory is 1.00 GiB, and enable_return_routed_experts keeps 4 bytes"),
    ],
)
def test_returning_expert_choices_is_refused_where_they_are_not_reported_or_budgeted(
    options, on_cpu, message, monkeypatch
):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: on_cpu)
    with pytest.raises(ConfigError, match=message):
        sglang_arguments({"enable_return_routed_experts": True}, from_mapping(options))


@pytest.mark.parametrize(("gpus", "tokens", "refused"), [(1, None, True), (1, 4096, False), (2, None, False)])
def test_ranks_that_share_a_gpu_need_the_size_of_their_kv_pools(gpus, tokens, refused, monkeypatch):
    monkeypatch.setattr(launch, "on_cpu", lambda kwargs: False)
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: gpus)
    two = {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True, "max_total_tokens": tokens}
    if refused:
        with pytest.raises(ConfigError, match=r"2 ranks share 1 GPU.*set with --max-total-tokens"):
            sglang_arguments(two, from_mapping({}))
    else:
        assert sglang_arguments(two, from_mapping({}))["tp_size"] == 1


def test_several_machines_are_refused_at_once():
    with pytest.raises(ConfigError, match="nnodes is 2; the ranks of an engine share one machine"):
        sglang_arguments({"model_path": "m", "device": "cpu", "nnodes": 2}, BatchConfig())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_total_tokens": -5}, "max_total_tokens is -5; it must be at least 1"),
        ({"context_length": 0}, "context_length is 0; it must be at least 1"),
        ({"max_running_requests": 0}, "max_running_requests is 0; it must be at least 1"),
        ({"dp_size": 0}, "dp_size is 0; it must be at least 1"),
        ({"pp_size": 2}, "the layout has 2 pipeline stages; in this release all ranks of an engine"),
        ({"mem_fraction_static": 7.0}, "mem_fraction_static is 7.0; it is a share of memory"),
        ({"log_level": "loud"}, "log_level is 'loud'; it must be one of critical, error, warning, info, debug"),
        ({"device": "tpu"}, "device is 'tpu'; it must be one of cpu, cuda"),
        ({"page_size": 0}, "page_size is 0; sgl_batch keeps KV in pages of at least 2 tokens"),
        ({"max_total_tokens": 10}, "max_total_tokens is 10, less than a page of KV, which has 64 tokens: raise"),
    ],
)
def test_values_that_sglang_takes_and_fails_on_later_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        sglang_arguments({"model_path": "m", **arguments}, BatchConfig())


@pytest.mark.parametrize(("build", "why"), [(None, "is a build for CPUs"), ("13.0", "finds none")])
def test_a_gpu_is_refused_where_there_is_none(build, why, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    with pytest.raises(ConfigError, match=rf"device is 'cuda', which needs an NVIDIA GPU, and torch \S+ {why}: leave"):
        sglang_arguments({"model_path": "m", "device": "cuda"}, BatchConfig())


@pytest.mark.parametrize(("num_ranks", "is_refused"), [(2, False), (3, True), (4, False)])
def test_ranks_share_experts_evenly_or_are_refused(num_ranks, is_refused, tmp_path):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "dtype": "bfloat16"}'
    )
    arguments = {"model_path": str(tmp_path), "enable_dp_attention": True, "device": "cpu"}
    arguments |= dict.fromkeys(("tp_size", "dp_size", "ep_size"), num_ranks)
    if is_refused:
        with pytest.raises(ConfigError, match=r"3 ranks cannot share 8 experts evenly; choose one of 1, 2, 4, 8$"):
            sglang_arguments(arguments, BatchConfig())
    else:
        assert sglang_arguments(arguments, BatchConfig())["dp_size"] == num_ranks
