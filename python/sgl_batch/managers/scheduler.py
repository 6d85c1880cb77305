"""Owns our subclass of SGLang's scheduler: SGLang's intake, results and controls, with our phases and boundaries.

core/ decides what runs next, and `BoundaryExecutor` carries it out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.core.admission_policy import make_admission
from sgl_batch.core.group_callbacks import BUILT_IN
from sgl_batch.core.order import make_order
from sgl_batch.core.page_boundary import boundary_due
from sgl_batch.core.plan_change import PlanChange
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.start_choices import StartChoices, line_of
from sgl_batch.distributed.rank_context import RankContext
from sgl_batch.distributed.rank_cores import cpus_and_threads
from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import kernels_in_use
from sgl_batch.kv_offload.kv_choice import kv_form
from sgl_batch.kv_offload.kv_tiers import KVTiers
from sgl_batch.kv_offload.overflow_store import overflow_directory
from sgl_batch.managers.boundary_executor import BoundaryExecutor
from sgl_batch.managers.pages_ahead import PagesAhead
from sgl_batch.managers.plan_changes import PlanChanges
from sgl_batch.managers.rank_all_gather import join_all_gather
from sgl_batch.managers.rank_callbacks import callbacks_of
from sgl_batch.managers.rank_group import RankGroup
from sgl_batch.managers.rank_heartbeat import RankHeartbeat
from sgl_batch.managers.rank_messages import Message
from sgl_batch.managers.rank_migration import MovingSequences, RankMigration, RankSequences
from sgl_batch.managers.rank_partition import make_partition
from sgl_batch.managers.rank_steps import Part, RankSteps
from sgl_batch.managers.speculation import Speculation
from sgl_batch.managers.steps_in_flight import StepsInFlight, check_overlap, is_wanted, with_copied_results
from sgl_batch.managers.stored_migration import StoredSequences
from sgl_batch.managers.token_moves import TokenMoves
from sgl_batch.managers.tp_worker import BatchTpWorker
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.memory.free_memory import give_back_heap
from sgl_batch.memory.process_memory import peak_resident_bytes
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.requests import partial_output_tag
from sgl_batch.requests.profile_limits import ProfileWatch
from sgl_batch.sglang_adapter.forward import forward_batch_of
from sgl_batch.sglang_adapter.grammars import limit_grammars, report_grammar_failures
from sgl_batch.sglang_adapter.profiling import LimitedProfiler
from sgl_batch.sglang_adapter.resuming import resume_from, start_anew
from sgl_batch.sglang_adapter.scheduling import (
    GetInternalStateReqOutput,
    NextBatchPlan,
    Scheduler,
    SetInternalStateReqOutput,
    await_input,
    brings_only_requests,
    drop_last_steps,
    intercept_controls,
    limits_request_time,
    rows_of,
    set_max_new_tokens,
    skip_ended_rows,
    updates_weights,
    uses_penalties,
)
from sgl_batch.sglang_adapter.stop_patterns import limit_stop_patterns
from sgl_batch.sglang_adapter.types.batches import BatchResult, ScheduleBatch
from sgl_batch.sglang_adapter.types.messages import AbortRequest, PauseRequest, StateChange
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.startup.decode_setup import settle_decode
from sgl_batch.startup.first_passes import reserve_first_passes
from sgl_batch.startup.kv_ahead import kv_ahead, take_at_start
from sgl_batch.startup.partition_setup import settle_partitions
from sgl_batch.startup.start_setup import attention_of, settle_decode_kv, settle_overlap, why_no_drafts

logger = logging.getLogger(__name__)

_UNBOUNDED = 1 << 30
# How long an idle rank waits for input before it asks the others again.
_IDLE_MS = 20
# Two steps in flight: the results of one are processed while the next one runs.
_OVERLAP_DEPTH = 2
# The heartbeat ends a wait for another rank that hangs. This limit is the last resort.
_STEP_TIMEOUT_S = 1800.0


class BatchScheduler(Scheduler):  # type: ignore[misc]
    """Group prefill and decode phases (BatchGen Algorithm 2) on SGLang's scheduler."""

    def __init__(self, *args: object, context: RunContext, **kwargs: object) -> None:
        self.context = context
        self._group_idles = True
        self._refused_change: str | None = None
        self._tiers: KVTiers | None = None
        self._mixed_prefill_results: tuple[ScheduleBatch, BatchResult] | None = None
        self._trace = TraceWriter(context.config.trace.trace_file, context.rank)
        self._plan_changes = PlanChanges(context.in_force, context.counters, self._trace)
        super().__init__(*args, **kwargs)
        # SGLang bounds inputs by the size of the pool. Ours is the context; `core.admission.refusal` checks the pool.
        self.max_req_input_len = self.model_config.context_len
        self.executor, self.choices = self._settled(context)
        runner = self.tp_worker.model_runner
        obstacle = why_no_drafts(runner, context)
        self._speculation = Speculation(self, self.executor, context, runner, obstacle=obstacle)
        self.in_flight = StepsInFlight()
        self.tp_worker.model_runner.before_sampling = self._process_while_computing
        report_grammar_failures(self)
        limit_grammars(self)
        limit_stop_patterns()
        skip_ended_rows(self)
        self.rank_steps = None if context.rank_context is None else self._join(context.rank_context)
        check_overlap(context.config.schedule.overlap, several_ranks=self.rank_steps is not None)
        context.start_log.end("choices settled")
        reserve_first_passes(runner, context)
        self._kv_ahead = kv_ahead(runner, context)
        take_at_start(self._kv_ahead)
        context.start_log.end(f"memory for KV taken, {format_bytes(self._kv_ahead.taken_bytes)}")

    def _settled(self, context: RunContext) -> tuple[BoundaryExecutor, StartChoices]:
        """Settle the choices of this start; return the executor that follows from them, and the choices."""
        runner, deterministic = self.tp_worker.model_runner, bool(self.server_args.enable_deterministic_inference)
        memory, ranks = context.config.memory, context.rank_context
        decode = settle_decode(runner, context)
        if memory.kv_store_bytes:
            self._tiers = KVTiers(self, runner.layer_runner, memory, context.counters, ranks)
        choices = StartChoices(
            decode_forward=decode,
            expert_runner=runner.expert_choice,
            attention=attention_of(runner),
            overlap=settle_overlap(context, decode, deterministic=deterministic),
            decode_kv=settle_decode_kv(context, self._tiers, decode, deterministic=deterministic),
        )
        logger.info("settled at the start: %s", line_of(choices.as_dict()))
        admission = make_admission(
            context.config.schedule.admission,
            on_cpu=self.server_args.device == "cpu",
            exclusive_store=self._tiers is not None and self._tiers.stored.exclusive,
        )
        mode, count = choices.decode_kv.mode, context.num_ranks
        kv, policy = kv_form(self, context.counters, self._tiers, mode, admission, memory, num_ranks=count)
        order = make_order(context.config.schedule.order)
        executor = BoundaryExecutor(
            self, context.in_force, context.counters, self._trace, kv, policy, order, rank=context.rank
        )
        return executor, choices

    def _join(self, rank_context: RankContext) -> RankSteps:
        """Connect to the other ranks. From now on a rank that dies or hangs ends all of them."""
        ranks = self.context.config.ranks
        decides = rank_context.rank == rank_context.topology.control_rank
        group = RankGroup(
            rank_context.channel("steps", Message),
            rank_context.topology,
            migration=Migration(ranks.migration),
            callbacks=callbacks_of(ranks) if decides else BUILT_IN,
            timeout_s=_STEP_TIMEOUT_S,
            all_gather=join_all_gather(rank_context, ranks.token_dispatcher, timeout_s=_STEP_TIMEOUT_S),
            trace=self._trace,
        )
        counters, executor, backend = self.context.counters, self.executor, rank_context.backend(self.device)
        RankHeartbeat(rank_context, ranks.rank_timeout_s).start()
        ahead: PagesAhead | None = None
        # With an account of its own for admission, sequences that can move have their KV in the store, or can go there.
        if self._tiers is None or executor.admission_ledger is executor.ledger:
            ahead = PagesAhead(self, executor.table, counters)
            with_kv: MovingSequences = RankSequences(self, executor, ahead=ahead)
        else:
            with_kv = StoredSequences(self, executor, self._tiers.stored)
        moves = TokenMoves(with_kv, self, executor, counters)
        migration = RankMigration(
            rank_context, moves, counters, backend=backend, step_timeout_s=_STEP_TIMEOUT_S, ahead=ahead
        )
        partition = None
        if self.tp_worker.model_runner.shares_passes and not limits_request_time():
            partition = make_partition(self, executor, rank_context, group.all_done, counters)
            group.decide_by(settle_partitions(self.tp_worker.model_runner, self.context, group.all_done))
        return RankSteps(executor, group, migration, self._plan_changes.at_boundary, partition)

    def init_tp_model_worker(self) -> None:
        self.tp_worker = BatchTpWorker(
            context=self.context,
            server_args=self.server_args,
            gpu_id=self.ps.gpu_id,
            ps=self.ps,
            nccl_port=self.nccl_port,
        )

    def init_profiler(self) -> None:
        super().init_profiler()
        watch = ProfileWatch()
        self.profiler_manager: LimitedProfiler = LimitedProfiler(
            self.profiler_manager, watch.must_end, give_back_heap, alone=self.context.rank_context is not None
        )

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        intercept_controls(self, self._carry_out)

    def get_init_info(self) -> dict[str, object]:
        """Return SGLang's info for the parent, with the classes that run here, which the parent verifies."""
        runner = self.tp_worker.model_runner
        classes = {
            "scheduler": self,
            "tp_worker": self.tp_worker,
            "model_runner": runner,
            "sampler": runner.sampler,
            "attention": runner.attn_backend,
            "allocator": self.token_to_kv_pool_allocator,
            "kv_pool": self.token_to_kv_pool_allocator.get_kvcache(),
        }
        info: dict[str, object] = super().get_init_info()
        info["sgl_batch"] = {
            "classes": {role: type(part).__name__ for role, part in classes.items()},
            "forward": runner.forward_text,
            "plan": self.context.in_force.plan.as_dict(),
            "kernels": kernels_in_use() if self.context.cpu_operators is not None else "sglang",
            "expert_runner": runner.expert_runner,
            "choices": self.choices.as_dict(),
        }
        if self.context.rank_context is not None:
            self.context.rank_context.rendezvous.publish(
                "info", self.context.rank_context.rank, json.dumps(info["sgl_batch"])
            )
        return info

    # Intake.

    def process_input_requests(self, recv_reqs: list[object]) -> None:
        """Process all results in flight before any message that does more than join the queue."""
        if not all(brings_only_requests(message) for message in recv_reqs):
            self.in_flight.drain()
        super().process_input_requests(recv_reqs)

    def init_req_max_new_tokens(self, req: Request) -> None:
        """Bound the output by the model's context, never by the free room in the pool (invariant 4)."""
        wanted = req.sampling_params.max_new_tokens
        room = self.model_config.context_len - len(req.origin_input_ids)
        set_max_new_tokens(req, max(0, min(_UNBOUNDED if wanted is None else wanted, room)))

    def _add_request_to_queue(self, req: Request, is_retracted: bool = False) -> None:
        self._resume(req)
        super()._add_request_to_queue(req, is_retracted)
        if self.waiting_queue and self.waiting_queue[-1] is req:
            self.executor.enqueue(req)

    def _resume(self, req: Request) -> None:
        """Resume a request that another engine has begun, after the tokens in its key; or begin it anew."""
        tokens = partial_output_tag.decode(req.extra_key)
        if tokens is None:
            return
        if not self.executor.table.can_resume(req, len(tokens)):
            start_anew(req)
            return
        resume_from(self, req, tokens)
        self.context.counters.add("sequences_resumed")
        self.context.counters.add("tokens_resumed", len(tokens))

    def abort_request(self, recv_req: AbortRequest) -> None:
        """Abort requests: with several ranks between the same two steps on all, because each may hold a replica."""
        if self.rank_steps is None:
            self._abort(recv_req)
        else:
            self.rank_steps.between_steps(partial(self._abort, recv_req))

    def _abort(self, recv_req: AbortRequest) -> None:
        def is_meant(rid: str) -> bool:
            return bool(recv_req.abort_all or rid.startswith(recv_req.rid))

        self.executor.removal.abort_retracted(is_meant)
        super().abort_request(recv_req)
        self.executor.removal.forget_removed()
        self.executor.removal.abort_outside_batches(is_meant)

    # One step.

    def get_next_batch_to_run(self, running_batch: ScheduleBatch, last_batch: ScheduleBatch) -> NextBatchPlan:
        if self.rank_steps is not None:
            self.rank_steps.make_changes()
        if self.executor.paused:
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        if self.grammar_manager.has_waiting_grammars():
            for request in self.grammar_manager.get_ready_grammar_requests():
                self._add_request_to_queue(request)
        self._abort_on_waiting_timeout()
        self._abort_on_running_timeout(running_batch)
        self.executor.removal.forget_removed()
        if self.in_flight:
            drop_last_steps(running_batch)
            if self.executor.decode_continues(running_batch):
                return NextBatchPlan(batch_to_run=self.executor.decode_step(running_batch), running_batch=running_batch)
            self.in_flight.drain()
        if not running_batch.is_empty():
            running_batch.filter_batch()
        if self.rank_steps is not None:
            return self._next_part(self.rank_steps.next_part(running_batch))
        if self._plan_changes.waits and boundary_due(self.executor.state(running_batch), self.executor.plan):
            self._plan_changes.at_boundary()
        batch, running_batch = self.executor.next_batch(running_batch)
        return NextBatchPlan(batch_to_run=batch, running_batch=running_batch)

    def _next_part(self, part: Part) -> NextBatchPlan:
        """Return this rank's batch of the group's step. A rank without rows takes part in the exchanges now."""
        runner = self.tp_worker.model_runner
        self._group_idles = part.idles
        runner.set_expert_calls(part.expert_calls)
        runner.partition_over(part.shared_by or sorted(self.executor.table.partition) or None)
        if part.takes_part and part.batch is None:
            runner.forward_without_rows()
        return NextBatchPlan(batch_to_run=part.batch, running_batch=part.running)

    def run_batch(self, batch: ScheduleBatch, pp_proxy_tensors: object = None) -> BatchResult:
        """Run one forward pass for a batch and the prompts that go with it, and sample the two separately."""
        prompts, self.executor.mixed_prefill = self.executor.mixed_prefill, None
        runner = self.tp_worker.model_runner
        if prompts is None:
            run_pass = partial(super().run_batch, pp_proxy_tensors=pp_proxy_tensors)
            result: BatchResult = self._speculation.run(batch, run_pass)
            self._note_choices([batch])
            return result
        runner.mix_prefill(forward_batch_of(self, prompts, runner))
        result = super().run_batch(batch, pp_proxy_tensors)
        self._note_choices([batch, prompts])
        self._mixed_prefill_results = prompts, super().run_batch(prompts)
        return result

    def _note_choices(self, batches: list[ScheduleBatch]) -> None:
        """Keep the experts that the last pass chose for the rows of its batches."""
        choices = self.tp_worker.model_runner.expert_choices
        if choices is not None:
            choices.note(row for batch in batches for row in rows_of(batch))

    def process_batch_result(self, batch: ScheduleBatch, result: BatchResult) -> None:
        prompts, self._mixed_prefill_results = self._mixed_prefill_results, None
        if batch.forward_mode.is_extend():
            self.executor.results.before_prefill(batch)
        if prompts is not None:
            # First: a decode row that finishes frees pages that a prompt of this pass may have found and share.
            self.executor.results.before_prefill(prompts[0])
        if self._results_can_wait(batch):
            self.in_flight.submit(with_copied_results(batch, result, self._process_results), depth=_OVERLAP_DEPTH)
        else:
            self._process_results(batch, result)
            for step, step_result in self._speculation.further_steps(batch):
                self._process_results(step, step_result)
        if prompts is not None:
            self._process_results(*prompts)

    def _process_while_computing(self) -> None:
        """Process the results of the step before, while the forward pass that was launched last runs."""
        if self.in_flight:
            self.context.counters.add("decode_steps_overlapped", len(self.in_flight.drain()))

    def _process_results(self, batch: ScheduleBatch, result: BatchResult) -> None:
        """Process results, except those of requests that finished in the step before, after this one was launched."""
        requests = [request for request in batch.reqs if not request.finished()]
        self.context.counters.add("tokens_discarded", len(batch.reqs) - len(requests))
        super().process_batch_result(batch, result)
        self.executor.results.process(batch, requests)

    def _results_can_wait(self, batch: ScheduleBatch) -> bool:
        """Return whether the next step may begin before these results are processed.

        With several ranks it may not: they agree on each step with the results of the last one.
        """
        return (
            is_wanted(self.context.config.schedule.overlap, self.choices.overlap.mode)
            and not self.context.in_force.plan.mix_prefill
            and self.rank_steps is None
            and batch.forward_mode.is_decode()
            and self.executor.overlaps
            and not uses_penalties(batch)
        )

    def on_idle(self) -> None:
        self.profiler_manager.look()
        with self.context.counters.clock.part("idle"):
            if self._group_idles and self._kv_ahead.step():
                return  # to look for messages: a step takes milliseconds
            if self.rank_steps is None and not self.executor.paused:
                super().on_idle()
            elif self._group_idles or self.executor.paused:
                await_input(self, _IDLE_MS)

    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        idle = bool(super().is_fully_idle(for_health_check))
        holds_copies = self.rank_steps is not None and self.rank_steps.holds_copies
        return idle and self.executor.is_empty and not self.in_flight and not holds_copies

    # Control.

    def _carry_out(self, handle: Callable[[object], object], asked: object) -> object:
        """Handle a request to the whole engine between two steps, the same two on all ranks.

        With several ranks this returns None, and the answer is sent later.
        """
        if self.rank_steps is None:
            return self._do(handle, asked)
        self.rank_steps.between_steps(lambda: self._answer(handle, asked))
        return None

    def _answer(self, handle: Callable[[object], object], asked: object) -> None:
        output = self._do(handle, asked)
        if output is not None:
            self.ipc_channels.send_to_tokenizer.send_output(output, asked)

    def _do(self, handle: Callable[[object], object], asked: object) -> object:
        """Handle a request to the whole engine. One that updates weights makes the present KV stale.

        With `flush_cache` all sequences lose their KV and compute it anew. Otherwise they keep it, and no later prompt
        shares it.
        """
        if updates_weights(asked):
            if asked.flush_cache:
                self.executor.removal.retract_all(self.running_batch)
            else:
                self.executor.invalidate_shared_prompts()
        return handle(asked)

    def pause_generation(self, recv_req: PauseRequest) -> None:
        """Begin no step until `continue_generation`. In mode `retract` all sequences compute their KV anew then."""
        if recv_req.mode == "retract":
            self.executor.removal.retract_all(self.running_batch)
        self.executor.paused = True

    def continue_generation(self, recv_req: object) -> None:
        super().continue_generation(recv_req)
        self.executor.paused = False

    def flush_cache(self, empty_cache: bool = True) -> bool:
        """Return whether no sequence has KV. SGLang wants an empty queue too, but queued sequences have no KV."""
        self.executor.sync()
        if not self.is_fully_idle() and not self.executor.has_kv:
            return True
        return bool(super().flush_cache(empty_cache))

    def save_sharded_model(self, **kwargs: object) -> None:
        with self.tp_worker.all_weights():
            super().save_sharded_model(**kwargs)

    def save_remote_model(self, **kwargs: object) -> None:
        with self.tp_worker.all_weights():
            super().save_remote_model(**kwargs)

    def set_internal_state(self, recv_req: StateChange) -> SetInternalStateReqOutput:
        """Change numbers of the plan between two steps, the same two on all ranks. Other names go to SGLang.

        A refinement waits for a boundary, the same one on all ranks.
        """
        change = PlanChange.of_message(recv_req.server_args)
        if change is None:
            return super().set_internal_state(recv_req)
        try:
            wanted = self.context.in_force.prepare(change.values)
        except ConfigError as error:
            self._refused_change = str(error)
            logger.warning("the plan stays as it is: %s", error)
            return SetInternalStateReqOutput(updated=False)
        self._refused_change = None
        check_overlap(wanted.schedule.overlap, several_ranks=self.rank_steps is not None)
        make = partial(self._plan_changes.make, wanted, change.why)
        if self.rank_steps is None:
            make()
        else:
            self.rank_steps.between_steps(make)
        return SetInternalStateReqOutput(updated=True)

    def _overflow_directory(self) -> str:
        """Return where sequences that outgrow the device's pages wait in files; "" if they have no files."""
        overflows = self._tiers is None and self.executor.admission_ledger.policy.grows
        return str(overflow_directory(self.context.config.memory)) if overflows else ""

    def get_internal_state(self, recv_req: object) -> GetInternalStateReqOutput:
        """Return SGLang's state, with our counters and plan under `sgl_batch`."""
        state = dict(super().get_internal_state(recv_req).internal_state)
        state["sgl_batch"] = {
            **self.context.counters.as_dict(),
            "forward": self.tp_worker.model_runner.forward_text,
            "plan": self.context.in_force.plan.as_dict(),
            "choices": self.choices.as_dict(),
            "refused_change": self._refused_change,
            "free_pages": self.executor.ledger.free_pages,
            "total_pages": self.executor.ledger.total_pages,
            "store": self.executor.store_state(),
            "overflow_directory": self._overflow_directory(),
            "sequences": self.executor.table.num_by_status(),
            "paused": self.executor.paused,
            "memory": {
                "peak_bytes": peak_resident_bytes(),
                "budget_bytes": self.context.config.memory.process_bytes,
                "weight_bytes": self.tp_worker.model_runner.weight_bytes,
                "kv_token_bytes": self.tp_worker.model_runner.kv_token_bytes,
            },
            "cpu": cpus_and_threads() if self.server_args.device == "cpu" else {},
            "rank": self.context.rank,
        }
        return GetInternalStateReqOutput(internal_state=state)
