"""Owns trial calls of a loaded model's experts on random rows: the time of a runner, and the error of its outputs.

startup/expert_setup decides which runners are tried and which one is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from sgl_batch.core.decode_choice import TimeUp
from sgl_batch.core.expert_runner_choice import RunnerMeasured
from sgl_batch.layers.moe.expert_runner import ExpertCall
from sgl_batch.sglang_adapter.types.models import ExpertLayer

# Calls go through several layers in turn: the weights of one layer might stay in a cache, those of a model do not.
_MOST_LAYERS = 8
_TIMED_CALLS = 8
_WARMING_CALLS = 2
_COMPARED_ROWS = 256
# Some milliseconds, during which the host launches the timed calls.
_AHEAD_CYCLES = 20_000_000
_SEED = 21


class ExpertTrial:
    """Calls experts with each of `num_tokens` rows, in ascending order; the rows are the same for all runners.

    Experts are chosen evenly. The outputs of the first runner that completes are the reference for errors. `call_of`
    gives the call of a layer by a runner's name.
    """

    def __init__(
        self, layers: Sequence[ExpertLayer], num_tokens: Sequence[int], call_of: Callable[[str], ExpertCall]
    ) -> None:
        self._layers, self._num_tokens, self._call_of = layers[:_MOST_LAYERS], tuple(num_tokens), call_of
        self._weight = layers[0].w13_weight
        self._reference: list[torch.Tensor] = []

    def run(self, name: str, time_is_up: Callable[[], bool]) -> RunnerMeasured:
        """Call each layer a few times by this runner. Raises TimeUp between two calls, and the runner's own errors."""
        call = self._call_of(name)
        outputs, seconds, device_seconds = [], [], []
        with torch.no_grad():
            for num_tokens in self._num_tokens:
                given = self._rows(num_tokens)
                output = self._calls(call, given, _WARMING_CALLS, time_is_up)
                outputs.append(output[:_COMPARED_ROWS].float().clone())
                self._finish()
                begun = time.perf_counter()
                self._calls(call, given, _TIMED_CALLS, time_is_up)
                self._finish()
                seconds.append((time.perf_counter() - begun) / _TIMED_CALLS)
                if self._weight.is_cuda:
                    device_seconds.append(self._device_s(call, given, time_is_up))
        if not self._reference:
            self._reference = outputs
        errors = tuple(_error(*pair) for pair in zip(outputs, self._reference, strict=True))
        if device_seconds:
            return RunnerMeasured(seconds=tuple(device_seconds), host_seconds=tuple(seconds), errors=errors)
        return RunnerMeasured(seconds=tuple(seconds), errors=errors)

    def _calls(
        self, call: ExpertCall, given: Sequence[torch.Tensor], calls: int, time_is_up: Callable[[], bool]
    ) -> torch.Tensor:
        """Make some calls; return the output of the first."""
        x_TM, weights_TK, ids_TK = given
        first = x_TM
        for number in range(calls):
            if time_is_up():
                raise TimeUp
            # A call may write its output over its rows.
            output = call(self._layers[number % len(self._layers)], x_TM.clone(), weights_TK, ids_TK)
            first = output if number == 0 else first
        return first

    def _device_s(self, call: ExpertCall, given: Sequence[torch.Tensor], time_is_up: Callable[[], bool]) -> float:
        """Return the seconds of a call on the device. It idles first, so that launches cost no time, as in a graph."""
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_AHEAD_CYCLES)
        begun.record()
        self._calls(call, given, _TIMED_CALLS, time_is_up)
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3 / _TIMED_CALLS

    def _rows(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        experts, _, hidden = self._weight.shape
        device = self._weight.device
        draw = torch.Generator(device).manual_seed(_SEED)
        x_TM = torch.randn(num_tokens, hidden, generator=draw, device=device).to(self._weight.dtype)
        scores_TE = torch.rand(num_tokens, experts, generator=draw, device=device)
        weights_TK, ids_TK = scores_TE.topk(self._layers[0].top_k)
        return x_TM, weights_TK / weights_TK.sum(1, keepdim=True), ids_TK.to(torch.int32)

    def _finish(self) -> None:
        if self._weight.is_cuda:
            torch.cuda.synchronize()


def _error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of an output's difference from the reference, relative to the reference's norm."""
    return float((output - reference).norm() / reference.norm().clamp(min=1e-30))
