"""Owns forward passes of made-up groups on a loaded model runner, and the seconds of their parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from sgl_batch.model_executor.families import Family
from sgl_batch.model_executor.model_runner import BatchModelRunner
from sgl_batch.planner.samples import PassSample
from sgl_batch.profiler.grid import GroupSize
from sgl_batch.sglang_adapter.trial_batches import trial_decode_batch, trial_prefill_batch

_PARTS = ("attention", "router", "experts")
_SEED = 23
_KV_STD, _RANDOM_PAGES = 0.02, 251
# Passes of a size go on for so long; one pass behind the first is the least.
_LEAST_PASSES, _MOST_PASSES, _ENOUGH_S = 1, 40, 0.1


class SomeLayers:
    """A family adapter that shows the layer runner only some layers of the model."""

    def __init__(self, family: Family, indices: Sequence[int]) -> None:
        self._family, self._indices = family, indices

    def layers(self, model: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """Return the chosen layers, in order."""
        whole = self._family.layers(model)
        return [whole[index] for index in self._indices]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)


class TrialPasses:
    """Runs groups through some layers of the model of a runner that has no sequences.

    KV pages hold random numbers: pages that were never written would all be the same page of zeros, in a cache. They
    are as small as those of made-up weights and differ from page to page, or all rows would go to the same experts.
    """

    def __init__(self, runner: BatchModelRunner) -> None:
        assert runner.layer_runner is not None, "the model has a family adapter"
        self._runner, self._layer_runner = runner, runner.layer_runner
        self._family = self._layer_runner.family
        for part in runner.token_to_kv_pool.all_parts:
            some = (_KV_STD * torch.randn(_RANDOM_PAGES, *part.shape[1:])).to(part.dtype)
            for pages in part.split(_RANDOM_PAGES):
                pages.copy_(some[: len(pages)])

    def measure(self, size: GroupSize, kind: str, layers: Sequence[int]) -> PassSample:
        """Run passes of a group through these layers, which are of one kind; return the middle one's seconds by part.

        A run has slow passes as well as fast ones.
        """
        with torch.no_grad(), self._only(layers):
            run = self._decode(size) if size.decode else self.prefill(size)
            run()
            seconds: list[dict[str, float]] = []
            begun = time.perf_counter()
            while len(seconds) < _LEAST_PASSES or (
                len(seconds) < _MOST_PASSES and time.perf_counter() - begun < _ENOUGH_S
            ):
                seconds.append(self._timed(run))
        parts = sorted(seconds, key=lambda one: sum(one.values()))[len(seconds) // 2]
        return PassSample(
            decode=size.decode,
            sequences=size.sequences,
            tokens=size.tokens,
            kind=kind,
            layers=len(layers),
            attention_s=parts["attention"],
            router_s=parts["router"],
            experts_s=parts["experts"],
            rest_s=parts["rest"],
        )

    @contextmanager
    def _only(self, layers: Sequence[int]) -> Iterator[None]:
        # All of these layers stand for those in the middle of a model.
        self._layer_runner.family, self._layer_runner.all_rows = cast(Family, SomeLayers(self._family, layers)), True
        try:
            yield
        finally:
            self._layer_runner.family, self._layer_runner.all_rows = self._family, False

    def _timed(self, run: Callable[[], object]) -> dict[str, float]:
        clock = self._layer_runner.counters.clock
        before, begun = clock.read(), time.perf_counter()
        run()
        wall_s, after = time.perf_counter() - begun, clock.read()
        parts = {name: after[name] - before[name] for name in _PARTS}
        return {**parts, "rest": max(wall_s - sum(parts.values()), 0.0)}

    def _decode(self, size: GroupSize) -> Callable[[], object]:
        table, runner = self._runner.req_to_token_pool.req_to_token, self._runner
        rows = torch.arange(1, size.sequences + 1)
        starts = self._lay_out(size.sequences, size.tokens + 1)
        batch = trial_decode_batch(runner, self._ids(size), starts + size.tokens, rows, size.tokens)
        assert int(table[1, size.tokens]) == int(starts[0]) + size.tokens, "the table says where the new KV goes"
        return lambda: runner.forward(batch)

    def prefill(self, size: GroupSize) -> Callable[[], Any]:
        """Return a function that runs a group of whole prompts, all of one length, and returns the runner's output."""
        runner = self._runner
        starts = self._lay_out(size.sequences, size.tokens)
        indices = (starts[:, None] + torch.arange(size.tokens)).flatten()
        batch = trial_prefill_batch(runner, self._ids(size), [size.tokens] * size.sequences, indices)
        return lambda: runner.forward(batch)

    def _ids(self, size: GroupSize) -> torch.Tensor:
        """Return token ids drawn at random: equal ones would all go to the same experts."""
        vocabulary = self._runner.model_config.vocab_size
        return torch.randint(vocabulary, (size.rows,), generator=torch.Generator().manual_seed(_SEED))

    def _lay_out(self, sequences: int, tokens: int) -> torch.Tensor:
        """Write pages of its own for each sequence into the request table; return their first KV indices [S]."""
        page = self._runner.server_args.page_size
        pages = -(-tokens // page)
        starts: torch.Tensor = page + page * pages * torch.arange(sequences)
        table = self._runner.req_to_token_pool.req_to_token
        table[1 : sequences + 1, :tokens] = (starts[:, None] + torch.arange(tokens)).to(table.dtype)
        return starts
