"""Owns our subclass of SGLang's worker: it drives our model runner, and updates weights in their plain order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import safetensors.torch

from sgl_batch.checkpoint.expert_layout import is_expert_weight
from sgl_batch.errors import ConfigError
from sgl_batch.model_executor.model_runner import BatchModelRunner
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.model_executor.weight_watch import load_share, reform_of
from sgl_batch.sglang_adapter.checkpoint_loading import reformed_weights
from sgl_batch.sglang_adapter.forward import TpModelWorker, keep_tensors_for, set_model_runner
from sgl_batch.sglang_adapter.names import SAFETENSORS
from sgl_batch.sglang_adapter.types.messages import TensorsUpdate, UpdateGroupRequest, WeightRequest
from sgl_batch.weights.unloaded_experts import is_expert_parameter

M = TypeVar("M")

logger = logging.getLogger(__name__)

_STREAMED = (
    "expert weights are read from the checkpoint while the model runs (--weights streamed); start the engine anew "
    "with another checkpoint, or with --weights resident"
)


class BatchTpWorker(TpModelWorker):  # type: ignore[misc]
    """SGLang's tensor-parallel worker over `BatchModelRunner`."""

    def __init__(self, *, context: RunContext, **kwargs: object) -> None:
        self._context = context
        super().__init__(**kwargs)

    def _init_model_runner(self) -> None:
        runner = BatchModelRunner(
            context=self._context,
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

    # Weights are read and written in their plain order, whatever the order in which kernels keep them. Streamed weights
    # cannot be updated: they are read from their files again, so an update would change the other weights alone.

    def update_weights_from_disk(self, recv_req: object) -> tuple[bool, str]:
        loads = load_share(self.model_config.hf_text_config, self._context.rank_context, resident=True)
        with reformed_weights(reform_of(self.model_runner.device, self.model_config.dtype, loads)):
            return self._updated(super().update_weights_from_disk, recv_req)

    def update_weights_from_distributed(self, recv_req: object) -> tuple[bool, str]:
        return self._updated(super().update_weights_from_distributed, recv_req)

    def update_weights_from_tensor(self, recv_req: TensorsUpdate) -> tuple[bool, str]:
        if self._context.rank_context is not None:
            keep_tensors_for(recv_req, self._context.rank_context.rank)
        is_file = recv_req.load_format == SAFETENSORS
        return self._updated(self._load_safetensors if is_file else super().update_weights_from_tensor, recv_req)

    def _load_safetensors(self, recv_req: TensorsUpdate) -> tuple[bool, str]:
        """Load the weights of a safetensors file, received as bytes. No code in it is run."""
        weights = safetensors.torch.load(recv_req.serialized_named_tensors[0])
        done: tuple[bool, str] = self.model_runner.weight_updater.update_weights_from_tensor(list(weights.items()))
        return done

    def init_weights_update_group(self, recv_req: UpdateGroupRequest) -> tuple[bool, str]:
        """Join the update group. Each of our ranks has its own number there, in order; to SGLang all are rank 0."""
        done: tuple[bool, str] = self.model_runner.weight_updater.init_weights_update_group(
            recv_req.master_address,
            recv_req.master_port,
            recv_req.rank_offset + self._context.rank,
            recv_req.world_size,
            recv_req.group_name,
            recv_req.backend,
        )
        return done

    def get_weights_by_name(self, recv_req: WeightRequest) -> object:
        """Return a weight; or None, with the reason in the log, as SGLang does for one that it cannot give."""
        if self._streams_weights and (is_expert_weight(recv_req.name) or is_expert_parameter(recv_req.name)):
            logger.error("%s is not in memory: %s", recv_req.name, _STREAMED)
            return None
        with self._plain_weights():
            return super().get_weights_by_name(recv_req)

    def all_weights(self) -> AbstractContextManager[None]:
        """Keep all weights in their plain order inside, to save the model. Raises ConfigError for streamed ones."""
        if self._streams_weights:
            raise ConfigError(f"the model cannot be saved: {_STREAMED}")
        return self._plain_weights()

    def _updated(self, update: Callable[[M], tuple[bool, str]], recv_req: M) -> tuple[bool, str]:
        """Return SGLang's answer to an update: whether it succeeded, and why not."""
        if self._streams_weights:
            return False, f"weights cannot be changed: {_STREAMED}"
        with self._plain_weights():
            try:
                return update(recv_req)
            except Exception as error:
                logger.exception("weights could not be updated")
                what = f"{type(error).__name__}: {error}"
                return False, f"weights could not be updated, and some may be new: {what}; send them all again"

    @property
    def _streams_weights(self) -> bool:
        operators = self._context.cpu_operators or self._context.gpu_experts
        return operators is not None and operators.streams_weights

    def _plain_weights(self) -> AbstractContextManager[None]:
        operators = self._context.cpu_operators
        return nullcontext() if operators is None else operators.plain_weights()
