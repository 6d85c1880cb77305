"""Owns how a rank loads a checkpoint: what reads it, its numbers' form, the proof that all are loaded, and sharing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from sgl_batch.checkpoint.expert_layout import is_expert_weight
from sgl_batch.checkpoint.model_directory import form_of_weights
from sgl_batch.checkpoint.quantised import is_kept_as_floats
from sgl_batch.core.model_numbers import NUM_EXPERTS, number
from sgl_batch.core.quantised_form import QuantisedForm
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.metrics.start_log import StartLog
from sgl_batch.model_executor.cpu_operators import CpuOperators
from sgl_batch.model_executor.device_needs import resident_weight_bytes
from sgl_batch.model_executor.families import family_of
from sgl_batch.sglang_adapter.checkpoint_loading import (
    ReformOf,
    WeightReading,
    WeightReform,
    WeightWatch,
    loading_weights,
)
from sgl_batch.sglang_adapter.layers import expert_layers, plain_linears
from sgl_batch.sglang_adapter.types.messages import ServerArgs
from sgl_batch.sglang_adapter.types.scheduler import ModelConfig
from sgl_batch.weights.dequantised import Dequantised, draw_numbers
from sgl_batch.weights.direct_experts import DirectExperts, is_of_experts
from sgl_batch.weights.direct_tensors import read_past_page_cache
from sgl_batch.weights.load_share import LoadShare
from sgl_batch.weights.loaded_weights import LoadedWeights
from sgl_batch.weights.shared_weights import SharedWeights
from sgl_batch.weights.unloaded_experts import is_expert_parameter, unloaded_experts

# Threads that read and pack while a model is loaded: more than cores, since some wait for the disk.
_LEAST_READERS = 8
# SGLang's, in which it reads safetensors where there are any.
_SAFETENSORS_FORMATS = ("auto", "safetensors")


def load_share(config: object, rank_context: RankContext | None, *, resident: bool) -> LoadShare:
    """Return what this rank loads of a model with Hugging Face's `config`: its own experts, and all other weights.

    Experts that are not `resident` stay in their files.
    """
    if not resident:
        return LoadShare(range(0))
    num_experts = number(lambda name: getattr(config, name, None), *NUM_EXPERTS)
    if rank_context is None or num_experts == 0:
        return LoadShare()
    held = num_experts // rank_context.topology.num_expert_shards
    return LoadShare(range(rank_context.expert_shard * held, (rank_context.expert_shard + 1) * held))


@contextmanager
def loading_checkpoint(
    server_args: ServerArgs,
    model_config: ModelConfig,
    rank_context: RankContext | None,
    operators: CpuOperators | None,
    device: str,
    *,
    resident: bool,
    num_threads: int,
) -> Iterator[list[str]]:
    """Inside, SGLang loads a model as this rank has it. Experts that are not `resident` stay in their files.

    On a CPU, quantised ones that are resident are read by threads of their own, at least `num_threads`.

    Yields the safetensors files: see `loading_weights`.
    """
    config = model_config.hf_text_config
    loads = load_share(config, rank_context, resident=resident)
    watch = _weight_watch(config, rank_context, operators, loads, resident=resident)
    reform = reform_of(device, model_config.dtype, loads)
    direct = _direct_experts(watch, server_args, rank_context, operators, num_threads) if resident else None
    left: Callable[[str], bool] | None = None if resident else is_of_experts
    if direct is not None and reform is not None:
        watch, left, reform = direct, direct.leaves, _reading_directly(direct, reform)
    experts = nullcontext() if left is None else unloaded_experts()
    with experts, loading_weights(server_args, watch, _weight_reading(rank_context), left, reform) as files:
        yield files


def _direct_experts(
    watch: WeightWatch,
    server_args: ServerArgs,
    rank_context: RankContext | None,
    operators: CpuOperators | None,
    num_threads: int,
) -> DirectExperts | None:
    """Return what reads a model's experts as they are quantised; None where they are loaded as other weights."""
    if operators is None or not operators.takes_packed_experts or server_args.load_format not in _SAFETENSORS_FORMATS:
        return None
    form = form_of_weights(server_args.model_path, server_args.revision)
    if form is None or not form.is_streamable:
        return None
    return DirectExperts(
        watch,
        form,
        shard=0 if rank_context is None else rank_context.expert_shard,
        num_threads=max(num_threads, torch.get_num_threads(), _LEAST_READERS),
        may_read=_is_known,
        adopt=operators.adopt_packed,
    )


def _reading_directly(direct: DirectExperts, reform_of: ReformOf) -> ReformOf:
    def of_model(name: str, revision: str | None) -> WeightReform | None:
        reform = reform_of(name, revision)
        return None if reform is None else direct.reading(reform)

    return of_model


def _weight_watch(
    config: object,
    rank_context: RankContext | None,
    operators: CpuOperators | None,
    loads: LoadShare,
    *,
    resident: bool,
) -> WeightWatch:
    """Return the watch of this rank, for a model with Hugging Face's `config`.

    On a CPU, several ranks share weights, and `operators` learn in which memory; of what `loads` has, others then load
    a part. `operators` adopt weights while others are loaded, if experts are `resident`: of several ranks, experts.
    """
    watch = LoadedWeights(
        number(lambda name: getattr(config, name, None), "num_hidden_layers"),
        is_tied=bool(getattr(config, "tie_word_embeddings", False)),
        # Each rank loads its own experts, and all other weights.
        is_elsewhere=is_expert_weight
        if rank_context is not None and rank_context.topology.num_expert_shards > 1
        else _never,
        by_layer=_all_parameters if rank_context is None else _parameters_of_experts,
        adopt=operators.adopt_early if operators is not None and resident else None,
        copy=None if operators is None else operators.copy,
    )
    if rank_context is None or operators is None:
        return watch
    return SharedWeights(
        watch,
        rank_context,
        loads=loads,
        small_bytes=operators.small_bytes,
        may_share=_is_known,
        share=operators.share_weights,
    )


def _weight_reading(rank_context: RankContext | None) -> WeightReading | None:
    """Return what reads files of weights in place of SGLang's loader.

    None for one rank of several: each reads all files, which the page cache has once for all of them.
    """
    return read_past_page_cache if rank_context is None else None


def reform_of(device: str, dtype: torch.dtype, loads: LoadShare) -> ReformOf | None:
    """Return what takes quantised weights to floats of `dtype`, with which a CPU computes; None on other devices.

    Of several ranks each takes only those to floats that it `loads`.
    """

    def of_model(name: str, revision: str | None) -> WeightReform | None:
        form = form_of_weights(name, revision)
        return None if form is None else Dequantised(form, dtype, loads)

    return of_model if device == "cpu" else None


def adopt_loaded(
    model: nn.Module, operators: CpuOperators | None, server_args: ServerArgs, start_log: StartLog, *, resident: bool
) -> int:
    """Let `operators` adopt a loaded model, and log it; return the memory of its weights, of which smaller forms count.

    `operators`: of a CPU, None on other devices. Dummy weights become numbers of the form in which the model's own are
    quantised.
    """
    if server_args.load_format == "dummy" and operators is not None and resident:
        _draw_weights(model, form_of_weights(server_args.model_path, server_args.revision))
    rounds = operators is not None and operators.rounds_to_int8
    start_log.end("model made, weights read", num_bytes=resident_weight_bytes(model, int8=rounds))
    if operators is not None:
        operators.adopt(model)
        start_log.end("weights packed")
    return resident_weight_bytes(model, int8=rounds)


def _draw_weights(model: nn.Module, form: QuantisedForm | None) -> None:
    if form is None:
        return
    for layer in expert_layers(model):
        for weight in (layer.w13_weight, layer.w2_weight):
            draw_numbers(form, weight.data)
    if form.integers or form.has_e4m3:  # mxfp4 is for experts alone
        for name, linear in plain_linears(model).items():
            if not is_kept_as_floats(f"{name}.weight"):
                draw_numbers(form, linear.weight.data.unsqueeze(0))


def _never(_name: str) -> bool:
    return False


def _all_parameters(model: nn.Module) -> Callable[[str], bool]:
    return (lambda _: True) if _is_known(model) else _never


def _parameters_of_experts(model: nn.Module) -> Callable[[str], bool]:
    return is_expert_parameter if _is_known(model) else _never


def _is_known(model: nn.Module) -> bool:
    """Return whether a model is of a family with an adapter: others may compute with weights while they are loaded."""
    return family_of(model) is not None
