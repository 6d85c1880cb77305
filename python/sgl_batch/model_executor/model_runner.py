"""Owns the model runner of a rank: SGLang's, with the coroutine forward in place of the model's own loop."""

from __future__ import annotations

import logging
from typing import Any

import torch

from sgl_batch.config import BatchConfig
from sgl_batch.core.plan import Plan, make_plan
from sgl_batch.model_executor.counters import Counters
from sgl_batch.model_executor.cpu_operators import CpuOperators
from sgl_batch.model_executor.families import FAMILIES, family_of
from sgl_batch.model_executor.layer_runner import LayerRunner
from sgl_batch.sglang_adapter.forward import (
    REENTRANT_BACKENDS,
    ForwardContext,
    ModelRunner,
    ModelRunnerOutput,
    forward_context,
)

logger = logging.getLogger(__name__)


class BatchModelRunner(ModelRunner):  # type: ignore[misc]
    """Runs prefill and decode groups through `LayerRunner`; anything else through SGLang's own forward."""

    def __init__(
        self,
        *args: Any,
        batch_config: BatchConfig,
        counters: Counters,
        cpu_operators: CpuOperators | None,
        **kwargs: Any,
    ) -> None:
        self.batch_config, self.counters, self.cpu_operators = batch_config, counters, cpu_operators
        self.plan: Plan | None = None
        self.layer_runner: LayerRunner | None = None
        super().__init__(*args, **kwargs)

    def init_attention_backends(self) -> None:
        """Build the attention backends, then the layer runner over them and the loaded model."""
        super().init_attention_backends()
        plan = self.make_plan()
        if self.cpu_operators is not None:
            self.cpu_operators.adopt(self.model)
        family = family_of(self.model)
        if family is None:
            known = ", ".join(name for f in FAMILIES for name in f.architectures)
            logger.warning(
                "%s has no family adapter (known: %s): its groups run through SGLang's own forward, "
                "unsplit and without accumulation",
                type(self.model).__name__,
                known,
            )
            return
        can_reenter = self.server_args.attention_backend in REENTRANT_BACKENDS
        if not can_reenter:
            logger.warning(
                "attention backend %s cannot hold the plans of several sub-batches: each group runs as one",
                self.server_args.attention_backend,
            )
        self.layer_runner = LayerRunner(
            model=self.model,
            family=family,
            attn_backend=self.attn_backend,
            plan=plan,
            counters=self.counters,
            can_reenter=can_reenter,
            expert_part="router" if self.device == "cpu" else "experts",
        )

    def make_plan(self) -> Plan:
        """Make the plan that the configuration asks for and what the device holds allow; from now on it holds."""
        self.plan = make_plan(
            self.batch_config, page_size=self.server_args.page_size, max_running=self.max_running_requests
        )
        if self.layer_runner is not None:
            self.layer_runner.plan = self.plan
        return self.plan

    def _forward_raw(self, forward_batch: Any, pp_proxy_tensors: Any, *args: Any, **kwargs: Any) -> Any:
        mode = forward_batch.forward_mode
        runner = self.layer_runner
        if runner is None or not (mode.is_decode() or mode.is_extend()) or self._graph_serves(forward_batch):
            self.counters.add("forwards_by_sglang")
            return super()._forward_raw(forward_batch, pp_proxy_tensors, *args, **kwargs)
        with forward_context(ForwardContext(attn_backend=self.attn_backend)):
            self._prepare_eager_forward_batch(forward_batch)
            return ModelRunnerOutput(logits_output=runner.forward(forward_batch), can_run_graph=False)

    def _graph_serves(self, forward_batch: Any) -> bool:
        """Whether a decode group is one sub-batch for which SGLang has captured a CUDA graph: nothing to gain."""
        assert self.plan is not None, "the plan is made with the attention backends"
        graphs = self.decode_cuda_graph_runner
        return bool(
            self.device != "cpu"
            and forward_batch.forward_mode.is_cuda_graph()
            and graphs is not None
            and forward_batch.batch_size <= self.plan.decode.b_attn
            and graphs.can_run_graph(forward_batch)
        )

    def sample(self, logits_output: Any, forward_batch: Any) -> torch.Tensor:
        with self.counters.clock.part("sampling"):
            tokens: torch.Tensor = super().sample(logits_output, forward_batch)
            return tokens
