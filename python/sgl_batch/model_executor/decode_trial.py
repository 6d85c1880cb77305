"""Owns trial decode steps on a loaded model before it has any sequence: their time in a mode, and their tokens.

startup/decode_setup decides which modes are tried and which one is used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sgl_batch.core.decode_choice import DEFAULT, Measured, TimeUp
from sgl_batch.sglang_adapter.trial_batches import trial_decode_batch
from sgl_batch.sglang_adapter.types.batches import ForwardBatch, LogitsOutput

# A size is captured as a graph after a few passes of that size: the steps before are neither timed nor compared.
_FIRST_TIMED = 6
_COMPARED = range(_FIRST_TIMED, _FIRST_TIMED + 4)
_MOST_STEPS = 18
_MOST_S = 1.0
_SEED = 20


class _Output(Protocol):
    logits_output: LogitsOutput


class _RequestTable(Protocol):
    req_to_token: torch.Tensor
    """[sequences, context length], int32."""


class TrialRunner(Protocol):
    """The part of a model runner that a trial uses. Nothing else uses its KV pool and request table meanwhile."""

    device: str
    max_total_num_tokens: int
    req_to_token_pool: _RequestTable

    def compute_decode_by(self, mode: str) -> None:
        """Compute decode groups in this mode from now on."""

    def graph_serves(self, forward_batch: ForwardBatch) -> bool:
        """Return whether the default mode leaves a decode group to a CUDA graph of SGLang's."""

    def forward(self, forward_batch: ForwardBatch) -> _Output:
        """Run one forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The steps of one group size: seconds of a step, seconds of the host until it is launched, and compared rows.

    `tokens` and `margins` are those of the rows of the compared steps.
    """

    step_s: float
    host_s: float
    tokens: Sequence[int]
    margins: Sequence[float]


class DecodeTrial:
    """Runs decode steps of groups of `sizes` sequences, the largest size first, each from its first token on.

    The input tokens are fixed, whatever the model answers: a step has the same inputs in each mode, so that output
    tokens can be compared one by one. Each sequence has pages of its own, of `page_size` tokens.
    """

    def __init__(self, runner: TrialRunner, sizes: Sequence[int], *, page_size: int, vocabulary: int) -> None:
        self._runner, self._page_size = runner, page_size
        table = runner.req_to_token_pool.req_to_token
        self._pages_each = -(-min(_MOST_STEPS, table.shape[1]) // page_size)
        room = min(runner.max_total_num_tokens // page_size // self._pages_each, len(table) - 1)
        self._sizes = tuple(dict.fromkeys(min(size, room) for size in sizes if room > 0))
        draw = torch.Generator().manual_seed(_SEED)
        shape = _MOST_STEPS, max(self._sizes, default=0)
        self._ids = torch.randint(vocabulary, shape, generator=draw).to(runner.device)
        self._num_steps = min(_MOST_STEPS, table.shape[1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the groups that fit into the pool; empty if it has room for no sequence."""
        return self._sizes

    def graph_serves(self) -> bool:
        """Return whether the default mode leaves the largest group to a CUDA graph of SGLang's."""
        return self._runner.graph_serves(self._batch(self._sizes[0], 0))

    def run_steps(self, mode: str, time_is_up: Callable[[], bool]) -> Measured:
        """Run the steps in this mode, and set the runner back to its default mode. Raises TimeUp between two steps."""
        runs: list[_Run] = []
        with torch.no_grad(), self._request_table_filled():
            self._runner.compute_decode_by(mode)
            try:
                runs += [self._run(size, time_is_up) for size in self._sizes]
            finally:
                self._runner.compute_decode_by(DEFAULT)
        return Measured(
            seconds=tuple(run.step_s for run in runs),
            tokens=tuple(token for run in runs for token in run.tokens),
            margins=tuple(margin for run in runs for margin in run.margins),
            host_seconds=tuple(run.host_s for run in runs),
        )

    def _run(self, size: int, time_is_up: Callable[[], bool]) -> _Run:
        took: list[float] = []
        launched: list[float] = []
        tokens: list[int] = []
        margins: list[float] = []
        for step in range(self._num_steps):
            if step >= _COMPARED.stop and sum(took[_FIRST_TIMED:]) > _MOST_S:
                break
            if time_is_up():
                raise TimeUp
            batch = self._batch(size, step)
            self._finish()
            begun = time.perf_counter()
            logits = self._runner.forward(batch).logits_output.next_token_logits
            launched.append(time.perf_counter() - begun)
            self._finish()
            took.append(time.perf_counter() - begun)
            assert logits is not None, "a decode step gives logits"
            if step in _COMPARED:
                # Read at once: the logits of one step may take all the memory that the device has left.
                two = logits.topk(2, dim=-1)
                best, second = two.values.float().unbind(-1)
                tokens += two.indices[:, 0].tolist()
                margins += ((best - second) / best.abs().clamp(min=1e-6)).tolist()
        step_s, host_s = (statistics.median(times[_FIRST_TIMED:] or times) for times in (took, launched))
        return _Run(step_s=step_s, host_s=host_s, tokens=tokens, margins=margins)

    def _batch(self, size: int, step: int) -> ForwardBatch:
        rows = torch.arange(1, size + 1, device=self._runner.device)
        first_pages = 1 + (rows - 1) * self._pages_each
        kv_indices = first_pages * self._page_size + step
        runner: Any = self._runner
        return trial_decode_batch(runner, self._ids[step, :size], kv_indices, rows, step)

    @contextmanager
    def _request_table_filled(self) -> Iterator[None]:
        """Inside, the request table has the KV indices of the trial's sequences."""
        table = self._runner.req_to_token_pool.req_to_token
        rows, steps = slice(1, self._sizes[0] + 1), slice(0, self._num_steps)
        before = table[rows, steps].clone()
        for step in range(self._num_steps):
            table[rows, step] = self._batch(self._sizes[0], step).out_cache_loc.to(table.dtype)
        try:
            yield
        finally:
            table[rows, steps] = before

    def _finish(self) -> None:
        if self._runner.device != "cpu":
            torch.cuda.synchronize()
