"""Owns which runner computes a loaded model's experts on a GPU, and whether the experts come from host memory.

Only its logic is tested, on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from sgl_batch.config import MemoryConfig
from sgl_batch.core.expert_runner_choice import RunnerTable
from sgl_batch.core.start_choices import Choice
from sgl_batch.errors import ConfigError
from sgl_batch.layers.moe.clamped_experts import clamped_experts_of
from sgl_batch.layers.moe.expert_runner import (
    ExpertCall,
    ExpertRunner,
    check_experts,
    create_expert_runner,
    installed_on_gpu,
)
from sgl_batch.metrics.counters import Counters
from sgl_batch.sglang_adapter.layers import expert_layers, replace_experts, sglang_experts_of
from sgl_batch.sglang_adapter.types.models import ExpertLayer
from sgl_batch.weights.device_expert_slots import CudaPrefetchStream, DeviceExpertSlots, PrefetchStream
from sgl_batch.weights.streamed_weights import stream_experts_to_device
from sgl_batch.weights.weight_streamer import WeightStreamer

logger = logging.getLogger(__name__)

OWN, AUTO = "sglang", "auto"

# Chooses the runners for `auto`: from layers, the runners' names (SGLang's own first) and the call of each runner.
SettleExperts = Callable[[Sequence[ExpertLayer], Sequence[str], Callable[[str], ExpertCall]], Choice]


class GpuExperts:
    """Computes the experts of one scheduler process. `name` is the flag's value; `settle` chooses runners for
    `auto`.
    """

    def __init__(
        self,
        name: str,
        counters: Counters,
        settle: SettleExperts,
        prefetch_stream: Callable[[], PrefetchStream] = CudaPrefetchStream,
    ) -> None:
        self._name, self._counters, self._settle = name, counters, settle
        self._prefetch_stream = prefetch_stream
        asked = OWN if name == AUTO else name
        # It is needed before `adopt`, to compute the memory of forward passes. `adopt` accepts or refuses it.
        self._choose(Choice(mode=asked, why=f"{asked}: asked for by expert_runner"))
        self._streamer: WeightStreamer[DeviceExpertSlots] | None = None
        # A runner's package is imported at its first call: a package that is not used need not be installed.
        self._runner = cache(create_expert_runner)

    @property
    def expert_runner(self) -> str:
        """The names of the runners that compute the experts, as text."""
        return str(self._table)

    def stream(self, model: torch.nn.Module, files: Sequence[str], memory: MemoryConfig, *, expert_shard: int) -> None:
        """Let the experts of a model that was loaded without them come from host memory. Call it before `adopt`.

        Raises ConfigError for a model or a checkpoint whose experts cannot be streamed.
        """
        layers = expert_layers(model)
        for layer in layers:
            _check_layer(layer)
        name = OWN if self._name == AUTO else self._name
        self._streamer = stream_experts_to_device(
            model,
            files,
            memory,
            expert_shard=expert_shard,
            device=layers[0].w13_weight.device if layers else torch.device("cpu"),
            runner=self._runner(name),
            stream=self._prefetch_stream(),
            counters=self._counters,
        )
        if self._name == AUTO:
            self._choose(Choice(mode=name, why=f"{name}: streamed experts are not measured"))

    @property
    def streams_weights(self) -> bool:
        return self._streamer is not None

    @property
    def streamed_bytes(self) -> int:
        """The device memory of streamed experts; 0 if they are not streamed."""
        return 0 if self._streamer is None else self._streamer.slots.tensors.num_bytes

    def adopt(self, model: torch.nn.Module) -> None:
        """Compute the experts of a loaded model with the chosen runner from now on.

        Raises ConfigError if the runner that was asked for cannot compute them.
        """
        layers = expert_layers(model)
        if self._streamer is not None:
            replace_experts(layers, self._call_unless_own)
            return
        if self._name == OWN:
            return
        if not layers:
            self._refuse("this model has no unquantised experts")
            return
        try:
            for layer in layers:
                _check_layer(layer)
            if self._name != AUTO:
                self._runner(self._name)
        except ConfigError as error:
            self._refuse(str(error))
            return
        if self._name == AUTO:
            self._choose(self._settled(layers))
        if self._table.names != {OWN}:
            replace_experts(layers, self._call_unless_own)

    def _choose(self, choice: Choice) -> None:
        self.choice = choice
        """The table of runners that compute the experts, as text, and the reason for it."""
        self._table = RunnerTable.parse(choice.mode)

    def _settled(self, layers: Sequence[ExpertLayer]) -> Choice:
        weight = layers[0].w13_weight
        names = installed_on_gpu(weight.dtype, clamped=any(clamped_experts_of(layer) is not None for layer in layers))
        choice = self._settle(layers, names, self._call_of)
        if weight.is_cuda:
            # Graphs are captured next, and need the memory that the calls took.
            torch.cuda.empty_cache()
        return choice

    def _call_of(self, name: str) -> ExpertCall:
        return sglang_experts_of if name == OWN else partial(_call, self._runner(name))

    def _refuse(self, reason: str) -> None:
        if self._name != AUTO:
            raise ConfigError(f"expert_runner is {self._name!r}: {reason}; choose auto or sglang")
        logger.warning("SGLang's own expert runner computes: %s", reason)
        self._choose(Choice(mode=OWN, why=f"{OWN}: {reason}"))

    def call_experts(
        self,
        layer: ExpertLayer,
        x_RM: torch.Tensor,
        topk_weights_RK: torch.Tensor,
        topk_ids_RK: torch.Tensor,
        *,
        f32_output: bool = False,
    ) -> torch.Tensor:
        """Compute a layer's experts with the runner that is chosen for so many rows: an `ExpertCall`."""
        given = x_RM, topk_weights_RK, topk_ids_RK
        if self._streamer is not None:
            return _call(self._streamer.experts, layer, *given, f32_output=f32_output)
        call = self._call_of(self._table.runner_for(len(x_RM)))
        return call(layer, *given, f32_output=f32_output)

    def _call_unless_own(self, layer: ExpertLayer, *given: torch.Tensor) -> torch.Tensor | None:
        """As `call_experts`, inside SGLang's layer; None where SGLang's own runner is chosen for so many rows."""
        x_RM, topk_weights_RK, topk_ids_RK = given
        if self._streamer is None and self._table.runner_for(len(x_RM)) == OWN:
            return None
        return self.call_experts(layer, x_RM, topk_weights_RK, topk_ids_RK)


def _call(
    runner: ExpertRunner,
    layer: ExpertLayer,
    x_RM: torch.Tensor,
    topk_weights_RK: torch.Tensor,
    topk_ids_RK: torch.Tensor,
    *,
    f32_output: bool = False,
) -> torch.Tensor:
    """An `ExpertCall`, but for the runner that computes it."""
    given = x_RM, layer.w13_weight, layer.w2_weight, topk_weights_RK, topk_ids_RK
    return runner(*given, f32_output=f32_output, clamped=clamped_experts_of(layer))[0]


def _check_layer(layer: ExpertLayer) -> None:
    config = layer.quant_method.moe_runner_config
    check_experts(config)
    if config.routed_scaling_factor not in (None, 1.0):
        raise ConfigError(f"its experts' sum is scaled by {config.routed_scaling_factor}, which only SGLang's own do")
    experts, double, hidden = layer.w13_weight.shape
    clamped_experts_of(layer)
    if layer.w2_weight.shape != (experts, hidden, double // 2):
        raise ConfigError("its experts have packed weights; leave SGLang's --moe-runner-backend out")
