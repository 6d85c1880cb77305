"""Owns the model runner of a rank: SGLang's, with the coroutine forward in place of the model's own loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.core.decode_choice import DEFAULT, EAGER, SGLANG
from sgl_batch.core.device_budget import DeviceNeeds, ModelShape, kv_bytes, working_bytes
from sgl_batch.core.gpu_reserves import check_gpu_has, gpu_reserves
from sgl_batch.core.graph_capture import graph_budget
from sgl_batch.core.model_refusals import check_without_adapter
from sgl_batch.core.plan import Plan
from sgl_batch.core.start_choices import Choice
from sgl_batch.core.supported_models import forward_text
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.column_split import ColumnSplit
from sgl_batch.layers.moe.split_experts import SplitExperts
from sgl_batch.layers.moe.token_dispatcher import create_token_dispatcher
from sgl_batch.mem_cache.device_page_pool import lazy_zeros
from sgl_batch.mem_cache.page_allocator import PageAllocator
from sgl_batch.memory.gpu_memory import read_gpu
from sgl_batch.memory.huge_pages import huge_parameters
from sgl_batch.memory.kept_memory import keep_freed_memory
from sgl_batch.memory.process_memory import forget_peak, resident_bytes
from sgl_batch.metrics.sampled_parts import DECODE, MIXED, PREFILL, SAMPLING
from sgl_batch.model_executor.attention_window import check_window
from sgl_batch.model_executor.cpu_operators import CpuOperators
from sgl_batch.model_executor.device_needs import cpu_reserves, gpu_use, model_shape
from sgl_batch.model_executor.expert_choices import ExpertChoices
from sgl_batch.model_executor.expert_exchange import ExpertExchange
from sgl_batch.model_executor.families import Family, family_of
from sgl_batch.model_executor.gpu_experts import GpuExperts
from sgl_batch.model_executor.layer_graphs import LayerGraphs
from sgl_batch.model_executor.layer_runner import LayerRunner
from sgl_batch.model_executor.partition_set import PartitionSets
from sgl_batch.model_executor.pass_memory import PassMemory, UntouchedPages
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.model_executor.weight_watch import adopt_loaded, loading_checkpoint
from sgl_batch.model_executor.yield_callback import make_yield_callback
from sgl_batch.sglang_adapter.expert_choice import capture_choices_with, expert_choosing_layers, reports_choices
from sgl_batch.sglang_adapter.forward import (
    DEVICE_METADATA_BACKENDS,
    REENTRANT_BACKENDS,
    ForwardContext,
    ModelRunner,
    ModelRunnerOutput,
    forward_context,
    graphs_wanted,
)
from sgl_batch.sglang_adapter.gpu_pools import use_our_pools
from sgl_batch.sglang_adapter.input_buffers import large_input_buffers_made_by
from sgl_batch.sglang_adapter.layers import expert_layers
from sgl_batch.sglang_adapter.memory import kv_token_bytes, set_kv_bytes
from sgl_batch.sglang_adapter.model_forms import models_as_configured
from sgl_batch.sglang_adapter.names import TRITON_ATTENTION
from sgl_batch.sglang_adapter.private_ports import on_this_machine
from sgl_batch.sglang_adapter.ranks import expert_shard
from sgl_batch.sglang_adapter.types.batches import ForwardBatch, LogitsOutput

logger = logging.getLogger(__name__)


def _nothing() -> None:
    pass


class BatchModelRunner(ModelRunner):  # type: ignore[misc]
    """Runs prefill and decode groups through `LayerRunner`, and everything else through SGLang's own forward.

    `before_sampling`: called between the launch of a forward pass and the launch of its sampling.
    """

    def __init__(self, *args: object, context: RunContext, **kwargs: object) -> None:
        self.context, self._counters, self._rank_context = context, context.counters, context.rank_context
        self.layer_runner: LayerRunner | None = None
        self.expert_choices: ExpertChoices | None = None
        self._partition_sets: PartitionSets | None = None
        self.before_sampling: Callable[[], None] = _nothing
        self._program_bytes = 0
        self.weight_bytes = self.kv_token_bytes = 0
        self._gpu_before = None if context.gpu_experts is None else read_gpu()
        if self._gpu_before is not None:
            check_gpu_has(context.config.memory.device_memory, self._gpu_before)
        self._pass_memory: PassMemory | None = None
        self._mixed_prefill: ForwardBatch | None = None
        self._decode_mode = DEFAULT
        self._mixed_logits: LogitsOutput | None = None
        super().__init__(*args, **kwargs)

    @property
    def _operators(self) -> CpuOperators | GpuExperts:
        """The object that computes the experts of the loaded model."""
        operators = self.context.cpu_operators or self.context.gpu_experts
        assert operators is not None, "a process has operators for a CPU or experts for a GPU"
        return operators

    @property
    def expert_runner(self) -> str:
        """The names of the runners that compute the experts, as text."""
        return self._operators.expert_runner

    @property
    def expert_choice(self) -> Choice:
        """The runners that compute the experts, and the reason."""
        return self._operators.choice

    @property
    def forward_text(self) -> str:
        """The forward pass that computes this model's groups, as text."""
        return forward_text(self.model_config.hf_config.architectures[0], has_adapter=self.layer_runner is not None)

    def init_torch_distributed(self) -> None:
        with on_this_machine(self.context.world_store):
            super().init_torch_distributed()

    def load_model(self) -> None:
        """Load the model; a rank loads its share of the experts. Streamed experts stay in their files."""
        rank_context, memory, config = self._rank_context, self.context.config.memory, self.model_config
        check_window(config.hf_config.architectures, config.hf_text_config, config.context_len)
        shard = (
            nullcontext()
            if rank_context is None
            else expert_shard(rank_context.expert_shard, rank_context.topology.num_expert_shards)
        )
        self._program_bytes = resident_bytes() if self.device == "cpu" else 0
        self.context.start_log.end("scheduler and process groups made")
        operators, resident = self.context.cpu_operators, memory.weights == "resident"
        loading = loading_checkpoint(
            self.server_args,
            config,
            rank_context,
            operators,
            self.device,
            resident=resident,
            num_threads=memory.weight_read_threads,
        )
        with shard, huge_parameters(), models_as_configured(), loading as files:
            super().load_model()
        if not resident:
            held = 0 if rank_context is None else rank_context.expert_shard
            self._operators.stream(self.model, files, memory, expert_shard=held)
        self.weight_bytes = adopt_loaded(
            self.model, operators, self.server_args, self.context.start_log, resident=resident
        )
        forget_peak()
        if self.device == "cpu" and resident:  # streamed weights take what is free
            keep_freed_memory()

    def init_kv_cache_configurator(self) -> None:
        """Size the KV pool: with a budget for the device, it gets what the other needs leave.

        Raises ConfigError if the budget is too small.
        """
        super().init_kv_cache_configurator()
        if self.device != "cpu" or self.server_args.attention_backend == TRITON_ATTENTION:
            use_our_pools(self.kv_cache_configurator, PageAllocator)
        self.kv_token_bytes = kv_token_bytes(self.kv_cache_configurator)
        memory = self.context.config.memory
        if memory.device_memory == 0:
            return
        most, page_size = self.server_args.max_running_requests, self.server_args.page_size
        plan, shape = self._fit_plan(most), model_shape(self.model_config)
        self.context.in_force.reserve()
        page_bytes = page_size * self.kv_token_bytes
        working = working_bytes(
            plan,
            shape,
            max_running=most,
            page_bytes=page_bytes,
            staged=self._stages_prompts,
            by_torch=self.expert_runner == "torch",
            num_ranks=1 if self._rank_context is None else self._rank_context.topology.num_attention_ranks,
        )
        working += self._graph_bytes
        needs = DeviceNeeds(
            program=self._program_bytes,
            weights=self.weight_bytes + self._operators.streamed_bytes,
            working=working,
            page=page_bytes,
            reserves=self._reserves(plan, shape),
        )
        set_kv_bytes(self.kv_cache_configurator, kv_bytes(memory.device_memory, needs, plan))

    def _reserves(self, plan: Plan, shape: ModelShape) -> dict[str, int]:
        """Return the bytes to keep free beyond weights, pages and a pass's tensors, by name."""
        if self._gpu_before is None:
            can_split = family_of(self.model) is not None
            kept = cpu_reserves(self.context.config, plan, shape, self._rank_context, can_split=can_split)
            if kept:
                logger.info("of the budget are kept: %s", ", ".join(f"{k} {format_bytes(v)}" for k, v in kept.items()))
            return kept
        now = read_gpu()
        # Sub-batches share their partial results; each has some of its own while its attention metadata is made.
        rows, processors = min(2 * plan.decode.b_attn, plan.decode.b_moe), now.processors
        use = gpu_use(self.server_args, self.model_config, self._rank_context, decode_rows=rows, processors=processors)
        reserves = gpu_reserves(self._gpu_before, now, use)
        logger.info("of the GPU are kept: %s", ", ".join(f"{k} {format_bytes(v)}" for k, v in reserves.items()))
        return reserves

    def init_attention_backends(self) -> None:
        """Build the attention backends, then the layer runner over them and the loaded model."""
        super().init_attention_backends()
        plan = self._fit_plan(self.max_running_requests)
        if self.context.config.schedule.share_prefixes and not plan.share_prefixes:
            logger.warning(
                "attention backend %s may attend before the KV of a whole batch is written: prompts that begin alike "
                "are each computed whole",
                self.server_args.attention_backend,
            )
        self.context.start_log.end("KV pools made")
        if self.context.gpu_experts is not None:
            self.context.gpu_experts.adopt(self.model)
        arena = None if self.context.cpu_operators is None else self.context.cpu_operators.shared_weights
        if arena is not None:
            arena.seal()
            held = format_bytes(arena.num_bytes)
            self.context.start_log.end(f"{held} of weights held once for {arena.num_sharers} ranks")
        self._pass_memory = self._measure_passes()
        family = family_of(self.model)
        if family is None:
            # For models whose config could not be read before the start.
            num_ranks = self.context.num_ranks if expert_layers(self.model) else 1
            check_without_adapter(type(self.model).__name__, self.context.config, num_ranks=num_ranks)
            return
        if not self._can_reenter:
            logger.warning(
                "attention backend %s cannot hold the metadata of several sub-batches: each group runs as one",
                self.server_args.attention_backend,
            )
        config, operators, reports = self.context.config, self.context.cpu_operators, reports_choices(self.server_args)
        on_yield = make_yield_callback(config, self.token_to_kv_pool, self.req_to_token_pool.req_to_token)
        in_memory = self._rank_context is None or self._token_dispatcher(self._rank_context) == "shared"
        recorded = None
        if operators is not None and in_memory and on_yield is None and not reports:
            recorded = operators.recorded_passes(self.attn_backend, self.model_config.hf_text_config)
        self.layer_runner = LayerRunner(
            model=self.model,
            family=family,
            attn_backend=self.attn_backend,
            in_force=self.context.in_force,
            counters=self._counters,
            can_reenter=self._can_reenter,
            expert_part="router" if self.device == "cpu" and not family.dense else "experts",
            exchange=None if self._rank_context is None else self._exchange(self._rank_context, family),
            layer_graphs=self._make_layer_graphs(),
            on_yield=on_yield,
            split=None if operators is None else operators.split,
            recorded=recorded,
            all_rows=reports,
        )
        self._layer_graphs = self.layer_runner.layer_graphs
        if self._rank_context is not None:
            self._partition_sets = PartitionSets(
                self._rank_context,
                self._counters,
                device=self.device,
                through_memory=in_memory,
                split_experts=self._split_experts(),
            )

    def _split_experts(self) -> Callable[[ColumnSplit], SplitExperts] | None:
        operators = self.context.cpu_operators
        if operators is None or self.context.config.ranks.partition_experts == "whole":
            return None
        return partial(operators.split_experts, self.model)

    @property
    def _graph_bytes(self) -> int:
        """The device memory that graphs of decode steps may take; 0 if none are captured."""
        forward = self.context.config.forward
        return graph_budget(
            forward.decode_graph_memory,
            device_captures=self.context.graphs is not None and graphs_wanted(self.server_args),
            metadata_on_device=self.server_args.attention_backend in DEVICE_METADATA_BACKENDS,
            num_ranks=self.context.num_ranks,
            streamed_weights=self._operators.streams_weights,
            reports_expert_choices=bool(self.server_args.enable_return_routed_experts),
            yields_to_user=forward.on_yield is not None,
        )

    def _make_layer_graphs(self) -> LayerGraphs | None:
        wanted, budget_bytes = self.context.config.forward.decode_graph_memory, self._graph_bytes
        if self.context.graphs is None or budget_bytes == 0:
            if wanted:
                logger.warning(
                    "decode_graph_memory is %d, and no decode step runs as a CUDA graph of ours: that takes a GPU, one "
                    "rank, resident weights, one of the attention backends %s, and neither --on-yield, "
                    "--enable-return-routed-experts nor --disable-cuda-graph",
                    wanted,
                    ", ".join(sorted(DEVICE_METADATA_BACKENDS)),
                )
            return None
        return LayerGraphs(
            graphs=self.context.graphs,
            counters=self._counters,
            budget_bytes=budget_bytes,
            most_rows=self.max_running_requests,
            pool_tokens=self.max_total_num_tokens,
            hidden_size=self.model_config.hidden_size,
            dtype=self.model_config.dtype,
        )

    def init_cuda_graphs(self, *args: object, **kwargs: object) -> None:
        """Make SGLang's runners of passes and graphs. On a CPU their buffers take memory as they are written."""
        with large_input_buffers_made_by(lazy_zeros) if self.device == "cpu" else nullcontext():
            super().init_cuda_graphs(*args, **kwargs)

    def init_routed_experts_capturer(self) -> None:
        """Keep the choice of experts by sequence, for the requests that ask for it."""
        if not self.server_args.enable_return_routed_experts:
            return
        layers, config = expert_choosing_layers(self.model), self.model_config.hf_text_config
        if not layers or len(set(layers)) < len(layers):
            raise ConfigError(
                f"{type(self.model).__name__} has {len(layers)} layers that choose experts, under {len(set(layers))} "
                "numbers, and each must have its own: leave --enable-return-routed-experts out"
            )
        self.expert_choices = ExpertChoices(
            num_layers=config.num_hidden_layers,
            num_expert_layers=len(layers),
            top_k=config.num_experts_per_tok,
        )
        capture_choices_with(self.expert_choices)

    def _measure_passes(self) -> PassMemory | None:
        """Return the measuring of forward passes, if streamed experts take the memory that passes leave."""
        streamer = None if self.context.cpu_operators is None else self.context.cpu_operators.fitted_streamer
        if streamer is None:
            return None
        memory, pool = self.context.config.memory, self.token_to_kv_pool
        page_size = self.server_args.page_size
        return PassMemory(
            streamer,
            self.context.in_force,
            model_shape(self.model_config),
            UntouchedPages(pool.all_parts, pool.layer_num, page_size, all_at_once=memory.kv_store_bytes > 0),
            staged_bytes=2 * page_size * self.kv_token_bytes // pool.layer_num if self._stages_prompts else 0,
            budget=memory.process_bytes,
            num_ranks=self.context.num_ranks,
        )

    def _exchange(self, rank_context: RankContext, family: Family) -> ExpertExchange | None:
        """Make the exchange with the other ranks' experts; None for a model without experts, which each rank has whole.

        It is a collective operation: every rank calls this at the same point of its start.
        """
        blocks = (family.expert_block(layer) for layer in family.layers(self.model))
        block = next((block for block in blocks if block is not None), None)
        if block is None:
            return None
        dispatcher = create_token_dispatcher(
            self._token_dispatcher(rank_context),
            rank_context.process_group("experts", rank_context.backend(self.device)),
            num_experts=block.experts.num_experts,
            hidden_size=self.model_config.hidden_size,
            device=torch.device(self.device),
        )
        assert dispatcher.shard == rank_context.expert_shard, "the group's ranks are the expert shards, in order"
        return ExpertExchange(dispatcher, self._operators.call_experts, self._counters)

    def _token_dispatcher(self, rank_context: RankContext) -> str:
        wanted = self.context.config.ranks.token_dispatcher
        if wanted != "auto":
            return wanted
        if rank_context.backend(self.device) == "nccl":
            return "nccl"
        return "gloo" if native_kernels() is None else "shared"

    @property
    def shares_passes(self) -> bool:
        """Whether this rank can share passes with others."""
        return self.layer_runner is not None and self._partition_sets is not None and self._partition_sets.can_be_made

    def partition_over(self, ranks: Sequence[int] | None) -> None:
        """Share the following passes with these attention ranks, this one among them, which run them too; None ends it.

        It is collective when these ranks share passes for the first time. Ranks must be able to (`shares_passes`).
        """
        runner, sets = self.layer_runner, self._partition_sets
        assert ranks is None or (runner is not None and sets is not None), "this rank shares its passes with no other"
        if runner is not None and sets is not None:
            runner.partition = None if ranks is None else sets.of(ranks)

    def set_expert_calls(self, calls: int) -> None:
        """Set how many expert calls each layer makes on every rank in the next forward pass."""
        if self.layer_runner is not None:
            self.layer_runner.expert_calls = calls

    def forward_without_rows(self) -> None:
        """Take part in a forward pass of the other ranks without rows. Models without an adapter exchange nothing."""
        if self.layer_runner is None:
            return
        with torch.no_grad():
            self.layer_runner.forward_without_rows(
                self.model_config.hidden_size, self.model_config.dtype, torch.device(self.device)
            )

    @property
    def _stages_prompts(self) -> bool:
        """Whether prefill groups write KV to pages of their own, from which it goes to the host store."""
        return self.context.config.memory.kv_store_bytes > 0 and family_of(self.model) is not None

    @property
    def _can_reenter(self) -> bool:
        return self.server_args.attention_backend in REENTRANT_BACKENDS

    def _fit_plan(self, max_running: int) -> Plan:
        # Cutting a group pays if KV streams or ranks exchange rows, and if partial sums of attention take megabytes for
        # each sequence: sub-batches share them.
        resident = self.context.config.memory.decode_kv != "streamed"
        frugal = not (self.use_mla_backend and self.server_args.attention_backend == TRITON_ATTENTION)
        family = family_of(self.model)
        return self.context.in_force.fit(
            page_size=self.server_args.page_size,
            max_running=max_running,
            can_reenter=self._can_reenter,
            whole_groups=self.device != "cpu" and self._rank_context is None and resident and frugal,
            dense=family is not None and family.dense,
        )

    def mix_prefill(self, prompts: ForwardBatch) -> None:
        """Compute a prefill batch together with the decode batch of the next forward pass.

        The caller runs a forward pass of the prefill batch right after that one, which returns the computed logits.
        """
        self._mixed_prefill = prompts

    def _forward_raw(
        self, forward_batch: ForwardBatch, pp_proxy_tensors: object, *args: object, **kwargs: object
    ) -> ModelRunnerOutput:
        if self._mixed_logits is not None:
            logits, self._mixed_logits = self._mixed_logits, None
            return ModelRunnerOutput(logits_output=logits, can_run_graph=False)
        batches = [forward_batch] if self._mixed_prefill is None else [forward_batch, self._mixed_prefill]
        self._mixed_prefill = None
        kind = DECODE if forward_batch.forward_mode.is_decode() else PREFILL
        with self._counters.clock.device_pass(kind if len(batches) == 1 else MIXED):
            return self._forward_batches(batches, pp_proxy_tensors, *args, **kwargs)

    def _forward_batches(
        self, batches: list[ForwardBatch], pp_proxy_tensors: object, *args: object, **kwargs: object
    ) -> ModelRunnerOutput:
        forward_batch, runner, mode = batches[0], self.layer_runner, batches[0].forward_mode
        if self._pass_memory is not None:
            self._pass_memory.make_room(*batches)
        is_sglangs = len(batches) == 1 and self._sglang_computes(forward_batch)
        if runner is None or not (mode.is_decode() or mode.is_extend()) or is_sglangs:
            self._counters.add("forwards_by_sglang")
            return super()._forward_raw(forward_batch, pp_proxy_tensors, *args, **kwargs)
        with forward_context(ForwardContext(attn_backend=self.attn_backend)):
            for batch in batches:
                self._prepare_eager_forward_batch(batch)
            logits, *mixed = runner.forward_parts(batches)
            self._mixed_logits = mixed[0] if mixed else None
            return ModelRunnerOutput(logits_output=logits, can_run_graph=False)

    def compute_decode_by(self, mode: str) -> None:
        """Compute decode groups in this mode from now on (core/decode_choice)."""
        self._decode_mode = mode
        if self.layer_runner is not None:
            self.layer_runner.layer_graphs = None if mode == EAGER else self._layer_graphs

    def _sglang_computes(self, forward_batch: ForwardBatch) -> bool:
        if self._decode_mode == DEFAULT or not forward_batch.forward_mode.is_decode():
            return self.graph_serves(forward_batch)
        return self._decode_mode == SGLANG

    def graph_serves(self, forward_batch: ForwardBatch) -> bool:
        """Return whether a decode group is one sub-batch for which SGLang has a CUDA graph: our loop gains nothing.

        False if ranks exchange rows: SGLang's graphs have the experts of this rank only. False in a step whose parts
        are measured: its graphs show none.
        """
        graphs = self.decode_cuda_graph_runner
        return bool(
            self.device != "cpu"
            and self._rank_context is None
            and not self._counters.clock.measures_parts
            and (self.layer_runner is None or self.layer_runner.on_yield is None)
            and forward_batch.forward_mode.is_cuda_graph()
            and graphs is not None
            and (self.layer_runner is None or self.layer_runner.decode_source is None)
            and forward_batch.batch_size <= self.context.in_force.plan.decode.b_attn
            and graphs.can_run_graph(forward_batch)
        )

    def sample(self, logits_output: LogitsOutput, forward_batch: ForwardBatch) -> torch.Tensor:
        self.before_sampling()
        clock = self._counters.clock
        with clock.device_pass(SAMPLING), clock.part("sampling"):
            tokens: torch.Tensor = super().sample(logits_output, forward_batch)
            return tokens
