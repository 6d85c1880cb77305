"""Owns passes that verify drafts: what each sequence drafts, the pass over it, and the steps that it gives.

core/speculation decides how much is drafted. A pass over drafts gives one step of all sequences, and then further ones
of the sequences whose drafts were right. Each step is processed as any other: a sequence that ends in one has none of
the later ones, and boundaries, pages and answers see steps of one token.

The ranks of a partition run the same rows. The first one drafts, and by the passes that it measures it decides how
much; the others verify the drafts that it gives them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import torch

from sgl_batch.core.speculation import (
    MOST_ROWS,
    Draft,
    Drafter,
    PassCost,
    SequenceDrafts,
    drafts_wanted,
    most_drafts,
    num_drafts,
    num_right,
)
from sgl_batch.layers.column_split import ColumnSplit
from sgl_batch.managers.boundary_executor import BoundaryExecutor
from sgl_batch.model_executor.model_runner import BatchModelRunner
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.named_function import find_function
from sgl_batch.sglang_adapter.types.batches import BatchResult, ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler
from sgl_batch.sglang_adapter.verifying import begin_verified_step, can_verify, step_result, verifying_batch

logger = logging.getLogger(__name__)


class Speculation:
    """Runs the decode passes of one rank with drafts, where they are wanted and pay.

    Args:
        scheduler: SGLang's scheduler.
        executor: counts the steps.
        context: has the configuration and the counters.
        runner: runs the passes. Of several ranks, it knows how many expert calls all make in the next pass.
        obstacle: why this engine verifies no drafts; None if it does.
    """

    def __init__(
        self,
        scheduler: SGLangScheduler,
        executor: BoundaryExecutor,
        context: RunContext,
        runner: BatchModelRunner,
        *,
        obstacle: str | None,
    ) -> None:
        self._scheduler, self._executor, self._context, self._runner = scheduler, executor, context, runner
        self._obstacle, self._said = obstacle, False
        name = context.config.schedule.drafter
        self._drafter: Drafter | None = None if name is None else find_function("drafter", name, "tokens and a number")
        self._sequences: dict[str, SequenceDrafts] = {}
        self._cost = PassCost()
        self._verified: list[list[int]] = []

    def run(self, batch: ScheduleBatch, run_pass: Callable[[ScheduleBatch], BatchResult]) -> BatchResult:
        """Run the next pass of a batch, and return its results. `further_steps` has those of right drafts.

        Args:
            batch: a batch; a decode batch is prepared for its next step.
            run_pass: runs a forward pass over a batch and samples.
        """
        if not self._drafts_for(batch):
            return run_pass(batch)
        begun = time.perf_counter()
        split = self._split
        drafts = self._draft(batch) if split is None else self._shared(batch, split)
        result = self._verify(batch, drafts, run_pass) if any(drafts) else run_pass(batch)
        self._cost.note(len(drafts) + sum(map(len, drafts)), time.perf_counter() - begun)
        return result

    def further_steps(self, batch: ScheduleBatch) -> Iterator[tuple[ScheduleBatch, BatchResult]]:
        """Begin each further step that the last pass of `batch` has given, and yield it with its results.

        The caller processes the results of the pass before the first, and those of each before the next one.
        """
        if not self._verified:
            return
        (verified, result), self._verified = (self._verified, self._result), []
        for number in range(1, max(map(len, verified))):
            rows = [row for row, own in enumerate(verified) if number < len(own) and not batch.reqs[row].finished()]
            if not rows:
                return
            self._executor.count_step()
            self._executor.results.begin_verified_step(len(rows))
            self._context.counters.add("drafts_accepted", len(rows))
            step = begin_verified_step(batch, rows)
            yield step, step_result(self._scheduler, step, result, [verified[row][number] for row in rows])

    def _drafts_for(self, batch: ScheduleBatch) -> bool:
        """Return whether the sequences of a batch may draft."""
        wanted = self._context.config.schedule.speculate
        if drafts_wanted(wanted) == 0:
            return False
        if self._obstacle is not None:
            if not self._said:
                logger.warning("speculate is %s, and no step drafts tokens: %s", wanted, self._obstacle)
            self._said = True
            return False
        small = batch.forward_mode.is_decode() and len(batch.reqs) < MOST_ROWS
        return small and self._executor.overlaps and can_verify(batch)

    def _draft(self, batch: ScheduleBatch) -> list[tuple[int, ...]]:
        """Return the drafts of each sequence that the next pass verifies."""
        wanted, plan = drafts_wanted(self._context.config.schedule.speculate), self._executor.plan
        known, self._sequences = self._sequences, {}
        drafts = []
        for request, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            most = most_drafts(
                position=length - 1,
                page_size=plan.page_size,
                tokens_left=request.sampling_params.max_new_tokens - len(request.output_ids),
            )
            sequence = self._sequences[request.rid] = self._known(request, known.get(request.rid))
            # The draft is made in full, so that its first tokens are compared with the next ones in any case.
            draft = sequence.draft(MOST_ROWS - 1)
            room = most if wanted is None else min(most, wanted)
            drafts.append(Draft(tokens=draft.tokens[:room], rate=draft.rate))
        taken = num_drafts(drafts, self._cost if wanted is None else None, most_rows=self._most_rows)
        return [draft.tokens[:number] for draft, number in zip(drafts, taken, strict=True)]

    def _shared(self, batch: ScheduleBatch, split: ColumnSplit) -> list[tuple[int, ...]]:
        """Return the drafts of each sequence of a partition: those of its first rank, on all of its ranks."""
        rows = len(batch.reqs)
        own = None
        if split.rank == 0:
            # A row has the number of drafts, and then these.
            own = torch.zeros(rows, MOST_ROWS, dtype=torch.int64)
            for row, draft in zip(own, self._draft(batch), strict=True):
                row[: 1 + len(draft)] = torch.tensor([len(draft), *draft])
        with self._context.counters.clock.part("exchange"):
            found = split.of_first(own, (rows, MOST_ROWS), torch.int64)
        return [tuple(tokens[:number]) for number, *tokens in found.tolist()]

    @property
    def _split(self) -> ColumnSplit | None:
        """How the ranks of this rank's partition share its passes; None outside one."""
        if not self._executor.table.partition:
            return None
        layers = self._runner.layer_runner
        assert layers is not None, "ranks that share passes run layer by layer"
        assert layers.partition is not None, "the set is known before its pass"
        return layers.partition.split

    @property
    def _most_rows(self) -> int:
        """The most rows of the next pass. Several ranks have agreed how many expert calls all of them make in it."""
        layers = self._runner.layer_runner
        if self._context.rank_context is None or layers is None:
            return MOST_ROWS
        return min(MOST_ROWS, layers.expert_calls * self._executor.plan.decode.expert_rows)

    def _known(self, request: Request, sequence: SequenceDrafts | None) -> SequenceDrafts:
        """Return a request's drafts with all its tokens."""
        vocab_size = self._scheduler.model_config.vocab_size
        made = SequenceDrafts(self._drafter, vocab_size=vocab_size) if sequence is None else sequence
        if not made.num_tokens:
            made.extend(request.origin_input_ids)
        made.extend(request.output_ids[made.num_tokens - len(request.origin_input_ids) :])
        return made

    def _verify(
        self, batch: ScheduleBatch, drafts: list[tuple[int, ...]], run_pass: Callable[[ScheduleBatch], BatchResult]
    ) -> BatchResult:
        """Run a pass over drafts, and return the results of its first step."""
        self._result = run_pass(verifying_batch(self._scheduler, batch, drafts))
        sampled, start = self._result.next_token_ids.tolist(), 0
        for own in drafts:
            tokens = sampled[start : start + 1 + len(own)]
            self._verified.append(tokens[: 1 + num_right(own, tokens)])
            start += 1 + len(own)
        self._context.counters.add("speculative_passes")
        self._context.counters.add("sequences_drafted_for", len(drafts))
        self._context.counters.add("drafts", sum(map(len, drafts)))
        return step_result(self._scheduler, batch, self._result, [own[0] for own in self._verified])
