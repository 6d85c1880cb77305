"""SGLang's classes have every attribute and method that our types of them name, and take the arguments that we give."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Protocol

import pytest
import torch
import zmq

from sgl_batch.layers.attention.cpu_paged import CpuPagedAttention
from sgl_batch.mem_cache.device_page_pool import DevicePagePool
from sgl_batch.mem_cache.latent_page_pool import LatentPagePool
from sgl_batch.mem_cache.page_allocator import PageAllocator
from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.gpu_pools import GpuLatentPool, GpuPagePool
from sgl_batch.sglang_adapter.types import batches, messages, models, requests, scheduler

with bootstrap.importing():
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.constrained.grammar_manager import GrammarManager
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.layers.communicator import LayerCommunicator
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import LinearBase, ReplicatedLinear
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK, TopKConfig
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
    from sglang.srt.managers import io_struct, schedule_batch
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.managers.tokenizer_manager import ReqState
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.models.deepseek_v2 import (
        DeepseekV2AttentionMLA,
        DeepseekV2DecoderLayer,
        DeepseekV2ForCausalLM,
        DeepseekV2MLP,
        DeepseekV2Model,
        DeepseekV2MoE,
        MoEGate,
    )
    from sglang.srt.models.glm4_moe import Glm4MoeSparseMoeBlock
    from sglang.srt.models.gpt_oss import GptOssSparseMoeBlock
    from sglang.srt.models.llama import LlamaDecoderLayer
    from sglang.srt.models.minimax_m2 import MiniMaxM2DecoderLayer
    from sglang.srt.models.mixtral import (
        MixtralAttention,
        MixtralDecoderLayer,
        MixtralForCausalLM,
        MixtralModel,
        MixtralMoE,
    )
    from sglang.srt.models.olmoe import OlmoeDecoderLayer, OlmoeMoE
    from sglang.srt.models.qwen2 import Qwen2DecoderLayer
    from sglang.srt.models.qwen2_moe import Qwen2MoeSparseMoeBlock
    from sglang.srt.models.qwen3 import Qwen3DecoderLayer
    from sglang.srt.models.qwen3_moe import (
        Qwen3MoeAttention,
        Qwen3MoeDecoderLayer,
        Qwen3MoeForCausalLM,
        Qwen3MoeMLP,
        Qwen3MoeModel,
        Qwen3MoeSparseMoeBlock,
    )
    from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats
    from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.common import Range
    from sglang.utils import TypeBasedDispatcher

# Of each type of ours the classes that stand behind it, each with what else sets attributes of its objects.
_BEHIND: dict[type, list[tuple[type, ...]]] = {
    requests.FinishReason: [(schedule_batch.FINISH_ABORT,), (schedule_batch.FINISH_LENGTH,)],
    requests.SamplingParams: [(SamplingParams,)],
    requests.RequestKV: [(schedule_batch.ReqKvInfo,)],
    requests.RequestLogprobs: [(schedule_batch.ReqLogprob,)],
    requests.RequestTimes: [(SchedulerReqTimeStats,)],
    requests.TokenRange: [(Range,)],
    requests.Request: [(schedule_batch.Req,)],
    requests.TokenizedRequest: [(io_struct.TokenizedGenerateReqInput,)],
    batches.ForwardMode: [(ForwardMode,)],
    batches.Penalties: [(BatchedPenalizerOrchestrator,)],
    batches.SamplingInfo: [(SamplingBatchInfo,)],
    batches.ScheduleBatch: [(schedule_batch.ScheduleBatch,)],
    batches.LogitsOutput: [(LogitsProcessorOutput,)],
    batches.BatchResult: [(GenerationBatchResult,)],
    batches.ForwardBatch: [(ForwardBatch,)],
    scheduler.RequestTable: [(ReqToTokenPool,)],
    scheduler.PagePool: [(DevicePagePool,), (LatentPagePool,), (GpuPagePool,), (GpuLatentPool,)],
    scheduler.KVPool: [(DevicePagePool,), (LatentPagePool,)],
    scheduler.PageAllocator: [(PageAllocator,)],
    scheduler.PrefixCache: [(ChunkCache,)],
    scheduler.GrammarManager: [(GrammarManager,)],
    scheduler.OutputStreamer: [(SchedulerOutputStreamer,)],
    scheduler.TokenRelay: [(FutureMap,)],
    scheduler.ResultProcessor: [(SchedulerBatchResultProcessor,)],
    scheduler.Dispatcher: [(TypeBasedDispatcher,)],
    scheduler.Poller: [(zmq.Poller,)],
    scheduler.IdleSleeper: [(IdleSleeper,)],
    scheduler.ModelConfig: [(ModelConfig,)],
    scheduler.SGLangScheduler: [(Scheduler,)],
    models.AttentionBackend: [(CpuPagedAttention,), (TritonAttnBackend,)],
    models.ExpertOptions: [(MoeRunnerConfig,)],
    models.ExpertMethod: [(UnquantizedFusedMoEMethod,)],
    models.ExpertLayer: [(FusedMoE, UnquantizedFusedMoEMethod)],
    models.ExpertOutput: [(StandardCombineInput,)],
    models.Weighted: [(MoEGate,), (LinearBase, UnquantizedLinearMethod)],
    models.DenseMlp: [(DeepseekV2MLP,)],
    models.ChoiceOptions: [(TopKConfig,)],
    models.ExpertChooser: [(TopK,)],
    models.ExpertChoice: [(StandardTopKOutput,)],
    models.Router: [(MoEGate,), (ReplicatedLinear, LinearBase, UnquantizedLinearMethod)],
    models.ExpertModules: [(MixtralMoE,), (Qwen3MoeSparseMoeBlock,), (DeepseekV2MoE,)],
    models.MixtralMoe: [(MixtralMoE,), (OlmoeMoE,)],
    models.DenseBlock: [(Qwen3MoeMLP,), (DeepseekV2MLP,)],
    models.SparseBlock: [(Qwen3MoeSparseMoeBlock,), (DeepseekV2MoE,)],
    models.ScaledMoe: [(DeepseekV2MoE,), (Glm4MoeSparseMoeBlock,)],
    models.GatedSharedMoe: [(Qwen2MoeSparseMoeBlock,)],
    models.GptOssMoe: [(GptOssSparseMoeBlock,)],
    models.Norm: [(RMSNorm,)],
    models.Attention: [(MixtralAttention,), (Qwen3MoeAttention,)],
    models.LatentAttention: [(DeepseekV2AttentionMLA,)],
    models.LayerCommunicator: [(LayerCommunicator,)],
    models.PlainLayer: [(LlamaDecoderLayer,), (MixtralDecoderLayer,), (OlmoeDecoderLayer,)],
    models.MixtralLayer: [(MixtralDecoderLayer,)],
    models.DenseLayer: [(LlamaDecoderLayer,), (Qwen2DecoderLayer,), (Qwen3DecoderLayer,)],
    models.OlmoeLayer: [(OlmoeDecoderLayer,)],
    models.MinimaxLayer: [(MiniMaxM2DecoderLayer,)],
    models.CommunicatingLayer: [(Qwen3MoeDecoderLayer,), (DeepseekV2DecoderLayer,)],
    models.AttendingLayer: [(Qwen3MoeDecoderLayer,)],
    models.LatentLayer: [(DeepseekV2DecoderLayer,)],
    models.DecoderBody: [(MixtralModel,), (Qwen3MoeModel,), (DeepseekV2Model,)],
    models.CausalModel: [(MixtralForCausalLM,), (Qwen3MoeForCausalLM,), (DeepseekV2ForCausalLM,)],
    models.RoutedRows: [(StandardDispatchOutput,)],
    messages.OpenAIRequest: [(ChatCompletionRequest,), (CompletionRequest,)],
    messages.GenerationRequest: [(io_struct.GenerateReqInput,)],
    messages.PromptsRequest: [(io_struct.GenerateReqInput,)],
    messages.ChoiceRequest: [(io_struct.GenerateReqInput,)],
    messages.RequestState: [(ReqState,)],
    messages.AbortRequest: [(io_struct.AbortReq,)],
    messages.StateChange: [(io_struct.SetInternalStateReq,)],
    messages.WeightsUpdate: [
        (io_struct.UpdateWeightFromDiskReqInput,),
        (io_struct.UpdateWeightsFromDistributedReqInput,),
        (io_struct.UpdateWeightsFromIPCReqInput,),
        (io_struct.UpdateWeightsFromTensorReqInput,),
    ],
    messages.UpdateGroupRequest: [(io_struct.InitWeightsUpdateGroupReqInput,)],
    messages.WeightRequest: [(io_struct.GetWeightsByNameReqInput,)],
    messages.PauseRequest: [(io_struct.PauseGenerationReqInput,)],
    messages.TensorsUpdate: [(io_struct.UpdateWeightsFromTensorReqInput,)],
    messages.ProfileRequest: [(io_struct.ProfileReq,)],
    messages.LoggingRequest: [(io_struct.ConfigureLoggingReq,)],
    messages.ServerArgs: [(ServerArgs,)],
}


def _named(protocol: type) -> dict[str, object]:
    """The attributes and methods of a type of ours; the methods as functions."""
    members = vars(protocol).items()
    # typing adds functions of its own.
    methods = {k: v for k, v in members if inspect.isfunction(v) and v.__module__ == protocol.__module__}
    properties = {k for k, v in members if isinstance(v, property)}
    return dict.fromkeys([*protocol.__annotations__, *properties]) | methods


def _set_by(node: ast.AST) -> Iterator[str]:
    """The attributes that a statement gives an object: assigned to `self`, or registered with a module."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
        yield node.attr
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".register_parameter"):
        yield from (argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant))


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _has(classes: tuple[type, ...]) -> set[str]:
    """The attributes that objects of the first class have, which the others may set as well."""
    found: set[str] = set()
    for cls in dict.fromkeys(base for one in classes for base in one.__mro__):
        found |= set(vars(cls)) | set(vars(cls).get("__annotations__", ()))
        if cls.__module__.startswith(("sglang", "sgl_batch")):
            found |= {name for node in ast.walk(_classes_of(cls.__module__)[cls.__name__]) for name in _set_by(node)}
    return found


def _takes(real: Callable[..., Any], ours: Callable[..., Any]) -> list[str]:
    """Return the fault of calling `real` with the arguments of `ours`."""
    given, every = inspect.signature(ours).parameters, list(inspect.signature(real).parameters.values())
    # A positional-only argument may have any name.
    positional = [name for name, parameter in given.items() if parameter.kind is parameter.POSITIONAL_ONLY]
    wanted = {parameter.name: parameter for parameter in every[len(positional) :]}
    kinds = {parameter.kind for parameter in wanted.values()}
    # Parameters that ours passes on (*rest, **named) are not compared.
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    by_name = [n for n, parameter in given.items() if n not in ("self", *positional) and parameter.kind not in variadic]
    faults = [
        f"no parameter {name}" for name in by_name if name not in wanted and inspect.Parameter.VAR_KEYWORD not in kinds
    ]
    required = [p.name for p in wanted.values() if p.default is p.empty and p.kind not in variadic]
    return faults + [f"also wants {name}" for name in required if name not in given]


def lacking(protocol: type, classes: tuple[type, ...]) -> list[str]:
    """Return the names of a type of ours that a class does not have."""
    there, faults = _has(classes), []
    for name, ours in _named(protocol).items():
        if name not in there:
            faults.append(f"{classes[0].__name__} has no {name}")
        elif callable(ours):
            # Calling a module of torch's calls its `forward`.
            is_call = name == "__call__" and issubclass(classes[0], torch.nn.Module)
            real = getattr(classes[0], "forward" if is_call else name)
            faults += [f"{classes[0].__name__}.{name}: {fault}" for fault in _takes(real, ours)]
    return faults


def _protocols() -> set[type]:
    modules = (batches, messages, models, requests, scheduler)
    return {
        value
        for module in modules
        for value in vars(module).values()
        if getattr(value, "_is_protocol", False) and value.__module__ == module.__name__
    }


def test_every_type_is_compared_with_its_sglang_class() -> None:
    assert set(_BEHIND) == _protocols()


def test_sglangs_classes_have_what_our_types_name() -> None:
    assert [fault for ours, behind in _BEHIND.items() for classes in behind for fault in lacking(ours, classes)] == []


class _MadeUpAttribute(Protocol):
    rid: str
    shoe_size: int


class _MadeUpMethod(Protocol):
    def dance(self) -> None: ...


class _MadeUpParameter(Protocol):
    def set_extend_range(self, start: int, finish: int) -> None: ...


class _MadeUpProperty(Protocol):
    @property
    def seqlen_in_miles(self) -> int: ...


@pytest.mark.parametrize(
    ("made_up", "faults"),
    [
        (_MadeUpAttribute, ["Req has no shoe_size"]),
        (_MadeUpMethod, ["Req has no dance"]),
        (_MadeUpProperty, ["Req has no seqlen_in_miles"]),
        (_MadeUpParameter, ["Req.set_extend_range: no parameter finish", "Req.set_extend_range: also wants end"]),
    ],
)
def test_the_comparison_finds_missing_names(made_up: type, faults: list[str]) -> None:
    assert lacking(made_up, (schedule_batch.Req,)) == faults


class _MadeUpCall(Protocol):
    def __call__(self, hidden_states: object, mood: object) -> object: ...


class _CallByPlace(Protocol):
    def __call__(self, anything: object, /) -> object: ...


class _CallOfNothing(Protocol):
    def __call__(self, /) -> object: ...


@pytest.mark.parametrize(
    ("made_up", "faults"),
    [
        (_MadeUpCall, ["MixtralMoE.__call__: no parameter mood"]),
        (_CallByPlace, []),
        (_CallOfNothing, ["MixtralMoE.__call__: also wants hidden_states"]),
    ],
)
def test_the_call_of_a_module_is_compared_with_its_forward(made_up: type, faults: list[str]) -> None:
    assert lacking(made_up, (MixtralMoE,)) == faults
