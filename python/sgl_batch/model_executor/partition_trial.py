"""Owns trial passes of all ranks together before there is any sequence: their seconds, alone and shared.

All ranks call the same methods in the same order, because passes exchange rows. startup/partition_setup says which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from sgl_batch.core.plan import Plan, num_expert_calls
from sgl_batch.model_executor.model_runner import BatchModelRunner
from sgl_batch.sglang_adapter.trial_batches import trial_decode_batch, trial_prefill_batch

_SEED = 31
# Of so many passes behind a first one the fastest counts: other programs only ever slow a pass down.
_PASSES = 3


class PartitionTrial:
    """Times passes on a runner without sequences.

    Args:
        runner: This rank's. Nothing else uses its KV pool and request table meanwhile.
        plan: In force.
        rank: Of the ranks that have sequences.
        ranks: How many there are.
    """

    def __init__(self, runner: BatchModelRunner, plan: Plan, *, rank: int, ranks: int) -> None:
        self._runner, self._plan, self._rank, self._ranks = runner, plan, rank, ranks
        self._table = runner.req_to_token_pool.req_to_token

    def fits(self, sequences: int, tokens: int) -> bool:
        """Return whether one rank has room for so many sequences of so many tokens."""
        page = self._plan.page_size
        pages = sequences * -(-tokens // page)
        rows, context = self._table.shape
        num_tokens: int = self._runner.max_total_num_tokens
        return sequences < rows and tokens <= context and (1 + pages) * page <= num_tokens

    def step_s(self, sequences: int, context: int, *, shared: bool) -> float:
        """Return the seconds of a decode step.

        Args:
            sequences: Of all ranks together, dealt to them evenly, the first ones to rank 0.
            context: Tokens of KV that each of them has.
            shared: Whether each rank has all of them, and the ranks share the step.
        """
        own = sequences if shared else sequences // self._ranks + (self._rank < sequences % self._ranks)
        most = sequences if shared else -(-sequences // self._ranks)
        return self._timed(lambda: self._step(own, context), num_expert_calls(most, self._plan.decode), shared=shared)

    def prompt_s(self, tokens: int, *, shared: bool) -> float:
        """Return the seconds of the pass of one prompt, which rank 0 has or, `shared`, all ranks."""
        own = shared or self._rank == 0
        calls = num_expert_calls(tokens, self._plan.prefill)
        return self._timed(lambda: self._prompt(tokens if own else 0), calls, shared=shared)

    def _timed(self, run: Callable[[], None], expert_calls: int, *, shared: bool) -> float:
        self._runner.set_expert_calls(expert_calls)
        self._runner.partition_over(range(self._ranks) if shared else None)
        took = []
        try:
            with torch.no_grad():
                run()
                for _ in range(_PASSES):
                    began = time.perf_counter()
                    run()
                    took.append(time.perf_counter() - began)
        finally:
            self._runner.partition_over(None)
        return min(took)

    def _step(self, sequences: int, context: int) -> None:
        if not sequences:
            self._runner.forward_without_rows()
            return
        with self._laid_out(sequences, context + 1) as starts:
            rows = torch.arange(1, sequences + 1)
            self._runner.forward(
                trial_decode_batch(self._runner, self._ids(sequences), starts + context, rows, context)
            )

    def _prompt(self, tokens: int) -> None:
        if not tokens:
            self._runner.forward_without_rows()
            return
        with self._laid_out(1, tokens) as starts:
            self._runner.forward(
                trial_prefill_batch(self._runner, self._ids(tokens), [tokens], starts + torch.arange(tokens))
            )

    def _ids(self, number: int) -> torch.Tensor:
        """Return token ids drawn at random: equal ones would all go to the same experts."""
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(self._runner.model_config.vocab_size, (number,), generator=generator)

    @contextmanager
    def _laid_out(self, sequences: int, tokens: int) -> Iterator[torch.Tensor]:
        """Inside, each sequence has pages of its own in the request table; yields their first KV indices [S]."""
        page = self._plan.page_size
        starts = page + page * -(-tokens // page) * torch.arange(sequences)
        rows = slice(1, sequences + 1)
        before = self._table[rows, :tokens].clone()
        self._table[rows, :tokens] = (starts[:, None] + torch.arange(tokens)).to(self._table.dtype)
        try:
            yield starts
        finally:
            self._table[rows, :tokens] = before
