"""Owns calls of a loaded model's experts on rows that are made up: how long a runner takes, and how its outputs differ.

Which runners are tried, and what follows, is decided elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from sgl_batch.core.decode_choice import TimeUp
from sgl_batch.core.expert_runner_choice import RunnerMeasured
from sgl_batch.sglang_adapter.types.models import ExpertLayer

# A call of one layer with rows [T, M], weights of choices [T, K] and ids of experts [T, K]; its output [T, M].
LayerCall = Callable[[ExpertLayer, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Calls go through several layers in turn: one layer's weights might lie in a cache that a model's do not fit.
_MOST_LAYERS = 8
_TIMED_CALLS = 8
_WARMING_CALLS = 2
_COMPARED_ROWS = 256
_SEED = 21


class ExpertTrial:
    """Calls of `num_tokens` rows each, ascending, the same for all runners; experts are chosen evenly.

    The first runner to compute all is the reference of errors. `call_of`: how a runner of a name calls a layer.
    """

    def __init__(
        self, layers: Sequence[ExpertLayer], num_tokens: Sequence[int], call_of: Callable[[str], LayerCall]
    ) -> None:
        self._layers, self._num_tokens, self._call_of = layers[:_MOST_LAYERS], tuple(num_tokens), call_of
        self._weight = layers[0].w13_weight
        self._reference: list[torch.Tensor] = []

    def run(self, name: str, time_is_up: Callable[[], bool]) -> RunnerMeasured:
        """Call each layer by this runner a few times. Raises TimeUp between two calls, and what the runner raises."""
        call = self._call_of(name)
        outputs, seconds = [], []
        with torch.no_grad():
            for num_tokens in self._num_tokens:
                given = self._rows(num_tokens)
                output = self._timed(call, given, _WARMING_CALLS, time_is_up)[1]
                outputs.append(output[:_COMPARED_ROWS].float().clone())
                seconds.append(self._timed(call, given, _TIMED_CALLS, time_is_up)[0])
        if not self._reference:
            self._reference = outputs
        errors = (_error(*pair) for pair in zip(outputs, self._reference, strict=True))
        return RunnerMeasured(seconds=tuple(seconds), errors=tuple(errors))

    def _timed(
        self, call: LayerCall, given: Sequence[torch.Tensor], calls: int, time_is_up: Callable[[], bool]
    ) -> tuple[float, torch.Tensor]:
        """Seconds of a call, and the first one's output."""
        x_TM, weights_TK, ids_TK = given
        first = x_TM
        self._finish()
        begun = time.perf_counter()
        for number in range(calls):
            if time_is_up():
                raise TimeUp
            # SGLang's own may write its output over its rows.
            output = call(self._layers[number % len(self._layers)], x_TM.clone(), weights_TK, ids_TK)
            first = output if number == 0 else first
        self._finish()
        return (time.perf_counter() - begun) / calls, first

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
    """How far an output is from the reference's, as a share of that one's size."""
    return float((output - reference).norm() / reference.norm().clamp(min=1e-30))
