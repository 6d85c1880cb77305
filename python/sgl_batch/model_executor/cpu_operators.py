"""Owns replacing the operators of SGLang's layers by our CPU operators in this process, and counting their calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from sgl_batch.checkpoint.quantised import is_kept_as_floats
from sgl_batch.config import ForwardConfig, MemoryConfig
from sgl_batch.core.model_numbers import number
from sgl_batch.core.start_choices import Choice
from sgl_batch.distributed.shared_arena import SharedArena
from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers import cpu_grammar, cpu_row_operators
from sgl_batch.layers.attention.cpu_paged import CpuPagedAttention
from sgl_batch.layers.attention.native_paged import PieceMetadata
from sgl_batch.layers.column_split import ColumnSplit, PassSplit
from sgl_batch.layers.moe import cpu_topk
from sgl_batch.layers.moe.clamped_experts import clamped_experts_of
from sgl_batch.layers.moe.expert_runner import ExpertRunner, check_experts, create_expert_runner
from sgl_batch.layers.moe.split_experts import SplitExperts
from sgl_batch.layers.packed_weights import PackedWeights
from sgl_batch.layers.small_weights import GroupedForm
from sgl_batch.mem_cache.latent_page_pool import LatentPagePool
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.cpu_blocks import BLOCK_MLPS, CpuBlocks
from sgl_batch.model_executor.cpu_mlp import MLPS, CpuMlps
from sgl_batch.model_executor.families import CommunicatingFamily, Family, family_of
from sgl_batch.model_executor.recorded_passes import RecordedPasses
from sgl_batch.sglang_adapter.layers import (
    StandardCombineInput,
    UnquantizedFusedMoEMethod,
    allow_plain_positions,
    expert_layers,
    named_expert_layers,
    plain_linears,
    plain_mlps,
    register_attention_backend,
    register_forward,
    replace_linear,
    replace_lm_head,
)
from sgl_batch.sglang_adapter.log_probabilities import adopt_prompt_log_probabilities
from sgl_batch.sglang_adapter.names import CPU_ATTENTION, CPU_DISPATCH_KEY
from sgl_batch.sglang_adapter.types.models import (
    AttentionBackend,
    ExpertLayer,
    ExpertMethod,
    RoutedRows,
    Router,
)
from sgl_batch.weights.expert_slots import ExpertSlots
from sgl_batch.weights.loaded_weights import Copy
from sgl_batch.weights.streamed_weights import stream_experts
from sgl_batch.weights.weight_streamer import WeightStreamer

_CODED_ISAS = ("amx_bf16", "avx512_bf16")
"""Instruction sets whose tiles decode weights as they multiply, so that codes make decode faster and nothing slower."""

_LATENT_ROWS_KEPT = 3
"""Of a head in a layer's record, in rows of latents: its query before and over them, and the results likewise."""

_LOGPROB_BYTES = 80 << 20
"""Of prompts' logits at a time: several times as much stays in the memory that freed tensors leave to the next."""


class CpuOperators:
    """The CPU operators of one scheduler process.

    Call `register` before SGLang builds the model, `stream` (with --weights streamed) after it is loaded, and then
    `adopt`. The attribute `expert_runner` is the name of the runner that computes. `splits_experts`: ranks will copy
    columns of experts, which must then lie in their own number type.
    """

    def __init__(self, counters: Counters, forward: ForwardConfig, *, splits_experts: bool = False) -> None:
        self._counters = counters
        self._kernels = native_kernels()
        self._int8, self._must_code = (forward.cpu_weight_dtype == name for name in ("int8", "lossless12"))
        int8_rows, expert_runner = forward.cpu_activations == "int8", forward.expert_runner
        pays = not splits_experts and self._kernels is not None and self._kernels.isa() in _CODED_ISAS
        coded = self._must_code or (forward.cpu_weight_dtype == "auto" and pays)
        self._grouped = forward.cpu_weight_dtype == "auto" and not splits_experts
        self._weights = PackedWeights(
            self._kernels, int8=self._int8, int8_rows=int8_rows, coded=coded, grouped=self._grouped
        )
        # Parameters, which live as long as the model.
        self._early_linears: set[int] = set()
        self._streamer: WeightStreamer[ExpertSlots] | None = None
        self.fitted_streamer: WeightStreamer[ExpertSlots] | None = None
        """The streamer of experts that take the memory that forward passes leave; None if --weight-memory is given."""
        self.shared_weights: SharedArena | None = None
        """The memory that this rank shares with others for their equal weights; None if there is none."""
        self.expert_runner = expert_runner
        if expert_runner == "auto":
            self.expert_runner = "torch" if self._kernels is None else "native"
        why = "as a CPU computes them" if expert_runner == "auto" else "asked for by expert_runner"
        self.choice = Choice(mode=self.expert_runner, why=f"{self.expert_runner}: {why}")
        self._run: ExpertRunner
        if self.expert_runner == "native":
            self._run = self._weights.experts
        else:
            self._run = create_expert_runner(self.expert_runner)

    def register(self) -> None:
        """Register attention, experts, their choice, row operators and grammar masks with SGLang."""

        # SGLang binds it to its expert method, which works for a plain function only, not for a bound method.
        def experts_forward(
            method: ExpertMethod, layer: ExpertLayer, dispatch_output: RoutedRows
        ) -> StandardCombineInput:
            weights, ids, _ = dispatch_output.topk_output
            out = self.call_experts(layer, dispatch_output.hidden_states, weights, ids)
            return StandardCombineInput(hidden_states=out)

        register_attention_backend(CPU_ATTENTION)(partial(CpuPagedAttention, split=self._weights.split))
        register_forward(UnquantizedFusedMoEMethod, experts_forward, CPU_DISPATCH_KEY)
        if self._kernels is not None:
            cpu_row_operators.register(self._kernels, CPU_DISPATCH_KEY)
        cpu_topk.register(self._kernels, CPU_DISPATCH_KEY)
        cpu_grammar.register()
        allow_plain_positions()

    def stream(self, model: torch.nn.Module, files: Sequence[str], memory: MemoryConfig, *, expert_shard: int) -> None:
        """Read the experts of a loaded model from a checkpoint's files from now on. Call it before `adopt`."""
        assert self._kernels is not None, "streaming is refused where there are no kernels"
        self._streamer = stream_experts(
            model,
            files,
            memory,
            expert_shard=expert_shard,
            int8=self._int8,
            kernels=self._kernels,
            counters=self._counters,
        )
        self._run = self._streamer.experts
        self.fitted_streamer = None if memory.weight_memory else self._streamer

    @property
    def split(self) -> PassSplit | None:
        """The split that products and attention read in each pass; None without the native kernels."""
        return None if self._kernels is None else self._weights.split

    def recorded_passes(self, attn_backend: AttentionBackend, config: object) -> RecordedPasses | None:
        """Make the record of a rank's decode passes; None where none can be recorded.

        `config`: Hugging Face's of the model.
        """
        native = self.expert_runner == "native" and not self.streams_weights
        if self._kernels is None or not native or not isinstance(attn_backend, CpuPagedAttention):
            return None
        pool, shares = attn_backend.pool, attn_backend.shares
        if not pool.native_layout:
            return None

        heads = number(lambda name: getattr(config, name, None), "num_attention_heads")
        row = pool.row_dim if isinstance(pool, LatentPagePool) else 0

        def version(pieces: PieceMetadata | None) -> object:
            shared = self._weights.split.current, pieces is not None and shares(pieces)
            return self._weights.version, *shared, *(part.data_ptr() for part in pool.page_parts(0))

        return RecordedPasses(
            self._kernels,
            attn_backend=attn_backend,
            counters=self._counters,
            version=version,
            num_layers=pool.layer_num,
            latent_numbers=_LATENT_ROWS_KEPT * heads * row,
        )

    def split_experts(self, model: torch.nn.Module, split: ColumnSplit) -> SplitExperts:
        """Make this rank's columns of all experts of a loaded model, for passes that a set of all ranks shares."""
        return SplitExperts(expert_layers(model), self._weights, split, self._counters)

    @property
    def streams_weights(self) -> bool:
        return self._streamer is not None

    @property
    def streamed_bytes(self) -> int:
        """The memory that streamed experts must have, whatever else needs memory."""
        if self._streamer is None:
            return 0
        slots, is_fitted = self._streamer.slots, self.fitted_streamer is not None
        return slots.staging_bytes + (self._streamer.bytes_to_stream if is_fitted else slots.tensors.num_bytes)

    @property
    def copy(self) -> Copy | None:
        """What copies large weights while they are loaded; None for torch."""
        return None if self._kernels is None else self._kernels.copy_past_caches_

    @property
    def rounds_to_int8(self) -> bool:
        return self._int8

    def small_bytes(self, weight: torch.Tensor) -> int:
        """Return the room in an arena for the smaller form that a weight in it may take."""
        return self._weights.small_bytes(weight)

    def share_weights(self, arena: SharedArena) -> None:
        """Let `adopt` pack the weights of an arena together with the ranks that share it. The caller seals it then."""
        self.shared_weights = arena
        self._weights.share(arena)

    def adopt(self, model: torch.nn.Module) -> None:
        """Pack the weights of a loaded model for the native kernels, and let its layers compute with them.

        Routers and the output projection are never rounded to int8: they choose experts and tokens. Raises ConfigError
        where --cpu-weight-dtype is lossless12, and the model has no experts of bfloat16.
        """
        family = family_of(model)
        if isinstance(family, CommunicatingFamily):
            CpuBlocks(family, self._weights, self.call_experts, self._counters).adopt(model)
        if self._kernels is not None:
            CpuMlps(self._weights).adopt(model)
            cpu_row_operators.adopt(self._kernels, model)
        routers = _routers(model, family)
        for module in replace_linear(model, self._weights.linear, unless=self._computes_with):
            if module.weight not in self._weights:
                self._weights.add_linear(module.weight, exact=module in routers)
        head = replace_lm_head(model, self._weights.linear, self._weights.rows)
        if head is not None and head.weight not in self._weights:
            self._weights.add_linear(head.weight, exact=True)
        adopt_prompt_log_probabilities(model, _LOGPROB_BYTES, self._kernels)
        self.adopt_experts(model)
        self._weights.settle()
        if self._must_code and not self._weights.has_codes:
            raise ConfigError(
                "cpu_weight_dtype is 'lossless12', which is for experts of bfloat16, and the model has none: leave it "
                "out, or give --dtype bfloat16 where its experts are of float32"
            )

    def _computes_with(self, weight: torch.Tensor) -> bool:
        """Return whether something else than the linear layer that has it computes with a packed weight."""
        return weight in self._weights and id(weight) not in self._early_linears

    def adopt_early(self, model: torch.nn.Module, loaded: Collection[str]) -> None:
        """Pack weights of a model while others are loaded, so that few lie there as they were; `adopt` does the rest.

        `loaded`: names of parameters. Of experts and MLPs all must be among them. Routers, the output projection, and
        what latent attention multiplies by head, are left to `adopt`.
        """
        self.adopt_experts(model, loaded)
        if self._kernels is None:
            return
        names = frozenset(loaded)
        mlps = MLPS + (BLOCK_MLPS if isinstance(family_of(model), CommunicatingFamily) else ())
        own = {id(one): name for name, one in model.named_parameters() if name in names and not is_kept_as_floats(name)}
        for mlp in plain_mlps(model, mlps):
            gate_up, down = mlp.gate_up_proj.weight, mlp.down_proj.weight
            in_mlp = own.pop(id(gate_up), None), own.pop(id(down), None)
            if None not in in_mlp and gate_up not in self._weights:
                self._weights.add_experts(gate_up, down)
        for linear in plain_linears(model).values():
            weight = linear.weight
            if id(weight) in own and weight not in self._weights and self._weights.add_linear(weight):
                self._early_linears.add(id(weight))

    def adopt_experts(self, model: torch.nn.Module, loaded: Collection[str] | None = None) -> None:
        """Pack the experts of a model that are not packed yet.

        `loaded`: names of parameters; of other layers than those whose experts are among them, nothing is packed.
        """
        if self.expert_runner != "native" or self._streamer is not None:
            return
        for name, layer in named_expert_layers(model):
            whole = loaded is None or {f"{name}.w13_weight", f"{name}.w2_weight"} <= set(loaded)
            if whole and layer.w13_weight not in self._weights:
                clamped = clamped_experts_of(layer) is not None
                self._weights.add_experts(layer.w13_weight, layer.w2_weight, clamped=clamped)

    @property
    def takes_packed_experts(self) -> bool:
        """Whether `adopt_packed` may be called: experts compute in 4 and 8 bits where a checkpoint has them so."""
        return self._grouped and self._kernels is not None and self.expert_runner == "native"

    def adopt_packed(self, layer: ExpertLayer, form: GroupedForm, data: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Take a layer's experts, which are packed in this form: [E, 2I, any] and [E, M, any]."""
        clamped = clamped_experts_of(layer) is not None
        self._weights.add_packed_experts(layer.w13_weight, layer.w2_weight, form, data, clamped=clamped)

    def plain_weights(self) -> AbstractContextManager[None]:
        """Inside, all weights lie in their plain order, so that they can be read and written."""
        return self._weights.plain()

    def call_experts(
        self,
        layer: ExpertLayer,
        x_RM: torch.Tensor,
        topk_weights_RK: torch.Tensor,
        topk_ids_RK: torch.Tensor,
        *,
        f32_output: bool = False,
    ) -> torch.Tensor:
        """Compute a layer's experts, and count the call: an `ExpertCall`."""
        check_experts(layer.quant_method.moe_runner_config)
        given = x_RM, layer.w13_weight, layer.w2_weight, topk_weights_RK, topk_ids_RK
        with self._counters.clock.part("experts"):
            out_RM, rows_per_expert = self._run(*given, f32_output=f32_output, clamped=clamped_experts_of(layer))
        self._counters.add_expert_call(rows_per_expert)
        return out_RM


def _routers(model: torch.nn.Module, family: Family | None) -> list[Router]:
    """Return the routers of a model; none are known for a family without an adapter."""
    if family is None:
        return []
    blocks = (family.expert_block(layer) for layer in family.layers(model))
    return [block.gate for block in blocks if block is not None]
