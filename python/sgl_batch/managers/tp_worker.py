"""Owns which model runner SGLang's worker drives."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sgl_batch.managers.run_context import RunContext
from sgl_batch.model_executor.model_runner import BatchModelRunner
from sgl_batch.sglang_adapter.forward import TpModelWorker, set_model_runner


class BatchTpWorker(TpModelWorker):  # type: ignore[misc]
    """SGLang's tensor-parallel worker over `BatchModelRunner`."""

    def __init__(self, *, context: RunContext, **kwargs: Any) -> None:
        self._context = context
        super().__init__(**kwargs)

    def _init_model_runner(self) -> None:
        runner = BatchModelRunner(
            batch_config=self._context.config,
            counters=self._context.counters,
            cpu_operators=self._context.cpu_operators,
            gpu_experts=self._context.gpu_experts,
            place=self._context.place,
            model_config=self.model_config,
            mem_fraction_static=self.server_args.mem_fraction_static,
            gpu_id=self.gpu_id,
            ps=self.ps,
            nccl_port=self.nccl_port,
            server_args=self.server_args,
            is_draft_worker=self.is_draft_worker,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            memory_pool_config=self.memory_pool_config,
            draft_model_idx=None,
        )
        set_model_runner(self, runner)

    # Weights are read and written in their plain order, whatever order the kernels keep them in.

    def update_weights_from_disk(self, recv_req: Any) -> Any:
        with self._plain_weights():
            return super().update_weights_from_disk(recv_req)

    def update_weights_from_distributed(self, recv_req: Any) -> Any:
        with self._plain_weights():
            return super().update_weights_from_distributed(recv_req)

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        with self._plain_weights():
            return super().update_weights_from_tensor(recv_req)

    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        with self._plain_weights():
            return super().update_weights_from_ipc(recv_req)

    def get_weights_by_name(self, recv_req: Any) -> Any:
        with self._plain_weights():
            return super().get_weights_by_name(recv_req)

    def _plain_weights(self) -> AbstractContextManager[None]:
        operators = self._context.cpu_operators
        return nullcontext() if operators is None else operators.plain_weights()
