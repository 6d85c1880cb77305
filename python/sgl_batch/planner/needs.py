"""Owns the estimate of the memory that a model takes of a device and of a host store, from its config and headers.

The arithmetic of budgets is core's, as in an engine. What only a running process can measure is a constant here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.checkpoint.tensors import ModelTensor
from sgl_batch.config import BatchConfig, from_mapping
from sgl_batch.core.device_budget import DeviceNeeds, kv_bytes, working_bytes
from sgl_batch.core.gpu_reserves import GpuReading, GpuUse, gpu_reserves
from sgl_batch.core.model_numbers import KEPT_EXACT, NUM_EXPERTS, Value, head_dims, kv_token_bytes, number, shape_of
from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.partition_memory import partition_reserves
from sgl_batch.core.plan import Plan, make_plan
from sgl_batch.core.supported_models import CPU
from sgl_batch.errors import ConfigError

# A scheduler's process on a CPU before it loads a model: Python, torch and SGLang.
PROGRAM_BYTES = 500 << 20
_STREAMED_LAYERS = 2
_SMALL_PREFILL = 2048
_FLOAT_BYTES = 4
# SGLang's defaults: a vocabulary is padded to this multiple, and Triton cuts a decoding sequence into so many parts.
_VOCABULARY_STEP = 64
_KV_SPLITS = 8
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class WeightBytes(NamedTuple):
    """Bytes of a model's weights on a device: of all, of routed experts, and of what of these can be streamed."""

    all: int
    experts: int
    streamable: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model as its files describe it. `config`: the text part of config.json; `dtype`: the engine's number type."""

    config: Mapping[str, Any]
    tensors: list[ModelTensor]
    dtype: str
    # Sums over thousands of tensors, which a search asks for again and again.
    _weight_bytes: dict[bool, WeightBytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def value(self) -> Value:
        return self.config.get

    @cached_property
    def expert_layers(self) -> int:
        """How many layers have routed experts."""
        return len({tensor.name.partition(".experts.")[0] for tensor in self.tensors if tensor.is_expert})

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of the KV of one token, in all layers."""
        return kv_token_bytes(self.value, self.item_bytes)

    def parameters(self) -> dict[str, int]:
        """Return how many parameters there are: in total, in routed experts, and active for one token."""
        own = [tensor for tensor in self.tensors if tensor.is_parameter]
        total = sum(tensor.count for tensor in own)
        experts = sum(tensor.count for tensor in own if tensor.is_expert)
        num_experts = number(self.value, *NUM_EXPERTS, default=1)
        chosen = number(self.value, "num_experts_per_tok", default=num_experts)
        return {"total": total, "experts": experts, "active": total - experts + experts * chosen // num_experts}

    @cached_property
    def more_as_floats(self) -> int:
        """Bytes that weights beside experts take more where ranks share them: none has 4 or 8 bits a number there."""
        small = [tensor for tensor in self.tensors if tensor.grouped is not None and not tensor.is_expert]
        return sum(tensor.count * self.item_bytes - tensor.num_bytes(self.item_bytes) for tensor in small)

    def weight_bytes(self, *, int8: bool = False) -> WeightBytes:
        """Return the bytes of weights on a device while they are resident."""
        if int8 not in self._weight_bytes:
            self._weight_bytes[int8] = self._sum_of_weights(int8=int8)
        return self._weight_bytes[int8]

    def _sum_of_weights(self, *, int8: bool) -> WeightBytes:
        tied = bool(self.config.get("tie_word_embeddings"))
        own = [tensor for tensor in self.tensors if not (tied and tensor.name.startswith("lm_head."))]
        sizes = [(self._bytes_of(tensor, int8=int8), tensor) for tensor in own]
        return WeightBytes(
            all=sum(num_bytes for num_bytes, _ in sizes) + self._rotary_bytes(),
            experts=sum(num_bytes for num_bytes, tensor in sizes if tensor.is_expert),
            streamable=sum(num_bytes for num_bytes, tensor in sizes if tensor.is_streamable),
        )

    def staged_expert_bytes(self) -> int:
        """Return the bytes that a thread takes to round a stacked expert to int8; 0 if experts are not stacked."""
        stacked = [tensor.stored for tensor in self.tensors if tensor.is_stacked]
        return max((one.num_bytes // one.shape[0] for one in stacked), default=0)

    def _bytes_of(self, tensor: ModelTensor, *, int8: bool) -> int:
        if int8 and len(tensor.stored.shape) >= 2 and not any(part in tensor.name for part in KEPT_EXACT):
            return tensor.count + _FLOAT_BYTES * tensor.num_outputs
        rows = tensor.stored.shape[0] if tensor.stored.shape else 1
        padding = -rows % _VOCABULARY_STEP if rows == number(self.value, "vocab_size") else 0
        return tensor.num_bytes(self.item_bytes) * (rows + padding) // max(rows, 1)

    def _rotary_bytes(self) -> int:
        """Return the bytes of the table of rotary angles for all positions, which layers share."""
        scaling = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        share = scaling.get("partial_rotary_factor", self.config.get("partial_rotary_factor")) or 1
        width = number(self.value, "qk_rope_head_dim", "rotary_dim", default=int(head_dims(self.value)[0] * share))
        has_angles = bool(scaling) or self.config.get("rope_theta") is not None
        return number(self.value, "max_position_embeddings") * width * self.item_bytes if has_angles else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a model is checked for: `budget` bytes of a device, pages and sequences of so many tokens.

    Attributes:
        ranks: Of an instance, which share the routed experts and the host store. What is counted is one of them.
        tensor: Whether the ranks share all weights; then `kv_parts` of them share the KV of a sequence.
        most: Bytes that a rank may take with the experts that it streams; 0 for no more than `budget`.
    """

    device: str
    budget: int
    page_size: int
    length: int
    ranks: int = 1
    tensor: bool = False
    kv_parts: int = 1
    most: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Bytes by use. `pages`: bytes left for KV; None where the model does not fit, and `lacks` says why.

    `on_device`, `in_store`: how many sequences of the target's length fit.
    """

    uses: dict[str, int]
    pages: int | None
    lacks: str
    on_device: int
    in_store: int

    @property
    def fits(self) -> bool:
        return self.pages is not None and self.on_device > 0


def fit(model: Model, config: BatchConfig, target: Target) -> Fit:
    """Return the memory that a model takes of the device under this configuration, and what is left for KV."""
    on_cpu, memory = target.device == CPU, config.memory
    latent = number(model.value, "kv_lora_rank") > 0
    most = 2 * config.forward.b_moe_decode
    plan = make_plan(config, page_size=target.page_size, max_running=most, whole_groups=not on_cpu and not latent)
    page_bytes = target.page_size * model.kv_token_bytes // target.kv_parts
    key_dim, value_dim = head_dims(model.value)
    weights = sum(rank_weights(model, config, target))
    shape = shape_of(
        model.value,
        hidden=number(model.value, "hidden_size", "n_embd"),
        vocabulary=number(model.value, "vocab_size"),
        layers=number(model.value, "num_hidden_layers", "n_layer"),
        head_dim=max(key_dim, value_dim),
        item_bytes=model.item_bytes,
    )
    staged = memory.kv_store_bytes > 0
    working = working_bytes(
        plan, shape, max_running=most, page_bytes=page_bytes, staged=staged, by_torch=False, num_ranks=target.ranks
    )
    row_bytes = number(model.value, "num_attention_heads") * _KV_SPLITS * (value_dim + 1) * _FLOAT_BYTES
    needs = DeviceNeeds(
        program=PROGRAM_BYTES if on_cpu else 0,
        weights=weights,
        working=working,
        page=page_bytes,
        reserves=partition_reserves(config, plan, shape, num_ranks=target.ranks)
        if on_cpu
        else _reserves(plan, row_bytes, exchanges=target.ranks > 1),
    )
    uses = {"program": needs.program, "weights": needs.weights, "working memory": needs.working, **needs.reserves}
    a_sequence = pages_for(target.length, target.page_size)
    in_store = memory.kv_store_bytes // target.ranks // page_bytes // a_sequence
    try:
        pages = kv_bytes(target.budget, needs, plan)
    except ConfigError as error:
        return Fit(uses=uses, pages=None, lacks=str(error), on_device=0, in_store=in_store)
    on_device, lacks = pages // page_bytes // a_sequence, ""
    if on_device == 0:
        lacks = (
            f"pages of KV get {format_bytes(pages)}, and a sequence of {target.length:,} tokens takes "
            f"{format_bytes(a_sequence * page_bytes)}; raise --device-memory, or lower --context-length"
        )
    return Fit(uses=uses, pages=pages, lacks=lacks, on_device=on_device, in_store=in_store)


def rank_weights(model: Model, config: BatchConfig, target: Target) -> tuple[int, int]:
    """Return the bytes of weights beside experts that one rank holds, and those of its experts.

    Of streamed experts the bytes that they have at least.
    """
    memory, is_int8 = config.memory, target.device == CPU and config.forward.cpu_weight_dtype == "int8"
    weights = model.weight_bytes(int8=is_int8)
    others, mine = weights.all - weights.experts, -(-weights.experts // target.ranks)
    if target.ranks > 1:
        others += model.more_as_floats
    if target.tensor:
        others = -(-others // target.ranks)
    if memory.weights == "streamed":
        layers = model.expert_layers
        streamed = -(-weights.streamable // target.ranks)
        staged = memory.weight_read_threads * model.staged_expert_bytes() if is_int8 else 0
        slots = memory.weight_memory or streamed * min(_STREAMED_LAYERS, layers) // max(layers, 1)
        return others + mine - streamed + staged, slots
    return others, mine


def _reserves(plan: Plan, row_bytes: int, *, exchanges: bool) -> dict[str, int]:
    nothing = GpuReading(free=0, held=0, processors=0)
    use = GpuUse(
        shares_gpu=True,
        exchanges=exchanges,
        decode_rows=min(2 * plan.decode.b_attn, plan.decode.b_moe),
        graph_rows=plan.decode.b_moe,
        attention_row_bytes=row_bytes,
        attention_workspace_bytes=0,
    )
    return gpu_reserves(nothing, nothing, use)


def remedy(model: Model, config: BatchConfig, target: Target, *, may_stream: bool) -> tuple[dict[str, Any], Fit] | None:
    """Return the fewest of our flags with which the model fits, and how it fits; None where no flags help."""
    sizes = [config.forward.b_moe_decode >> step for step in range(1, config.forward.b_moe_decode.bit_length())]
    groups: list[dict[str, Any]] = [{"b_moe_decode": size, "b_attn_decode": 0} for size in sizes]
    small: dict[str, Any] = {"b_moe_prefill": min(config.forward.b_moe_prefill, _SMALL_PREFILL)}
    streamed: dict[str, Any] = {"weights": "streamed"} if may_stream else {}
    tries = [
        streamed,
        *groups,
        *({**one, **small} for one in groups),
        *({**streamed, **one, **small} for one in groups),
    ]
    for flags in tries:
        found = fit(model, from_mapping({**config.flat(), **flags}), target)
        if found.fits:
            return {name: value for name, value in flags.items() if value != config.flat()[name]}, found
    return None
