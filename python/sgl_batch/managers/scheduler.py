"""Owns the scheduler process's subclass: SGLang's intake, results and control; our phases and boundaries.

What runs next is decided in core/ and carried out by `BoundaryExecutor`.
"""

from __future__ import annotations

import logging
from typing import Any

from sgl_batch import config
from sgl_batch.errors import ConfigError
from sgl_batch.managers.boundary_executor import BoundaryExecutor
from sgl_batch.managers.run_context import RunContext
from sgl_batch.managers.tp_worker import BatchTpWorker
from sgl_batch.managers.trace import TraceWriter
from sgl_batch.sglang_adapter.scheduling import (
    GetInternalStateReqOutput,
    NextBatchPlan,
    Scheduler,
    SetInternalStateReqOutput,
    set_max_new_tokens,
)

logger = logging.getLogger(__name__)

_UNBOUNDED = 1 << 30


class BatchScheduler(Scheduler):  # type: ignore[misc]
    """Group prefill and decode phases (BatchGen Algorithm 2) on SGLang's scheduler."""

    def __init__(self, *args: Any, context: RunContext, **kwargs: Any) -> None:
        self.context = context
        super().__init__(*args, **kwargs)
        # SGLang's bound is the pool's size; ours is the context, and `core.admission.refusal` knows the pool.
        self.max_req_input_len = self.model_config.context_len
        self.executor = BoundaryExecutor(
            self,
            self.tp_worker.model_runner.plan,
            context.counters,
            TraceWriter(context.config.trace.trace_file),
        )

    def init_tp_model_worker(self) -> None:
        self.tp_worker = BatchTpWorker(
            context=self.context,
            server_args=self.server_args,
            gpu_id=self.ps.gpu_id,
            ps=self.ps,
            nccl_port=self.nccl_port,
        )

    def get_init_info(self) -> dict[str, Any]:
        """SGLang's info for the parent, with the classes that run here, which the parent verifies."""
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
        info: dict[str, Any] = super().get_init_info()
        info["sgl_batch"] = {
            "classes": {role: type(part).__name__ for role, part in classes.items()},
            "coroutine_forward": runner.layer_runner is not None,
            "plan": runner.plan.as_dict(),
        }
        return info

    # Intake.

    def init_req_max_new_tokens(self, req: Any) -> None:
        """Bound the output by the model's context, never by what the pool happens to hold (invariant 4)."""
        wanted = req.sampling_params.max_new_tokens
        room = self.model_config.context_len - len(req.origin_input_ids)
        set_max_new_tokens(req, max(0, min(_UNBOUNDED if wanted is None else wanted, room)))

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        super()._add_request_to_queue(req, is_retracted)
        if self.waiting_queue and self.waiting_queue[-1] is req:
            self.executor.enqueue(req)

    def abort_request(self, recv_req: Any) -> None:
        super().abort_request(recv_req)
        self.executor.forget_removed()
        self.executor.abort_outside_batches(lambda rid: recv_req.abort_all or rid.startswith(recv_req.rid))

    # One step.

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        if self.grammar_manager.has_waiting_grammars():
            for request in self.grammar_manager.get_ready_grammar_requests():
                self._add_request_to_queue(request)
        self._abort_on_waiting_timeout()
        self._abort_on_running_timeout(running_batch)
        self.executor.forget_removed()
        if not running_batch.is_empty():
            running_batch.filter_batch()
        batch, running_batch = self.executor.next_batch(running_batch)
        return NextBatchPlan(batch_to_run=batch, running_batch=running_batch)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        if batch.forward_mode.is_extend():
            self.executor.before_prefill_results(batch)
        super().process_batch_result(batch, result)
        self.executor.after_results(batch)

    def on_idle(self) -> None:
        with self.context.counters.clock.part("waiting"):
            super().on_idle()

    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        return bool(super().is_fully_idle(for_health_check)) and self.executor.is_empty

    # Control.

    def set_internal_state(self, recv_req: Any) -> Any:
        """Change numbers of the plan between two forward passes; other names are SGLang's."""
        changes = recv_req.server_args
        if not changes.keys() <= config.field_names():
            return super().set_internal_state(recv_req)
        runner = self.tp_worker.model_runner
        try:
            runner.batch_config = config.from_mapping({**runner.batch_config.flat(), **changes})
        except ConfigError as error:
            logger.warning("the plan stays as it is: %s", error)
            return SetInternalStateReqOutput(updated=False)
        self.executor.plan = runner.make_plan()
        return SetInternalStateReqOutput(updated=True)

    def get_internal_state(self, recv_req: Any) -> Any:
        """SGLang's state with our counters and plan under `sgl_batch`."""
        state = dict(super().get_internal_state(recv_req).internal_state)
        state["sgl_batch"] = {
            **self.context.counters.as_dict(),
            "plan": self.tp_worker.model_runner.plan.as_dict(),
            "free_pages": self.executor.ledger.free_pages,
            "total_pages": self.executor.ledger.total_pages,
        }
        return GetInternalStateReqOutput(internal_state=state)
