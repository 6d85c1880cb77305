"""Owns virtual sequences that decode with too few device pages by `decide_residency`; each step is checked."""

from __future__ import annotations

from collections.abc import Iterable

from sgl_batch.core.coroutine import Event, advance
from sgl_batch.core.page_ledger import PageLedger, pages_for
from sgl_batch.core.plan import Plan
from sgl_batch.core.residency import Residency, decide_residency
from sgl_batch.core.resident_prompts import ResidentPrompts
from sgl_batch.core.sequence import SequenceState, Status


class VirtualPressure:
    """A device of some pages and a store without limit. `restore_steps`: decode steps that restoring KV takes."""

    def __init__(self, pages: int, plan: Plan, *, restore_steps: int) -> None:
        self.ledger, self.plan, self.restore_steps = PageLedger(pages, plan.page_size), plan, restore_steps
        self.most_holders = plan.decode.b_moe
        self.running: list[SequenceState] = []
        self.waiting: list[SequenceState] = []
        self.restoring: list[tuple[SequenceState, int]] = []
        self.finished: list[SequenceState] = []
        self.prompts = ResidentPrompts[tuple[int, int]]()
        self._prompt_of: dict[str, list[tuple[int, int]]] = {}
        self.operations = self.suspensions = self.restores = self._clock = 0

    def add(self, sequence: SequenceState) -> None:
        """Add a sequence whose prompt is computed, with its KV in the store."""
        sequence.status, sequence.generated_tokens = Status.READY, 1
        self._prompt_of[sequence.sequence_id] = self._shared_pages(sequence)
        self._wait(sequence)

    def _shared_pages(self, sequence: SequenceState) -> list[tuple[int, int]]:
        """Return the pages of its prompt that others can share."""
        full = sequence.prompt_tokens // self.plan.page_size
        return [(sequence.arrival % 3, number) for number in range(full)]

    def _wait(self, sequence: SequenceState) -> None:
        self._clock += 1
        sequence.waits_since = self._clock
        self.waiting.append(sequence)

    def run(self) -> None:
        """Run until all sequences have finished."""
        while self.waiting or self.running or self.restoring:
            self.interval()

    def _leaves_device(self, sequence: SequenceState) -> None:
        """Do nothing: the KV is in the store already."""

    def interval(self) -> None:
        """Run a boundary and the steps after it; steps have no rows while all KV is still on its way."""
        before = self._progress()
        self._boundary()
        for _ in range(self.plan.boundary_tokens):
            self._step()
        assert self._progress() > before, "outputs grow, or copies of KV progress"

    def preempt(self) -> None:
        """Run a boundary before the interval is over."""
        self._boundary()

    def steps(self, count: int) -> None:
        """Run `count` decode steps."""
        for _ in range(count):
            self._step()

    def _progress(self) -> tuple[int, int, int]:
        every_sequence = [*self.running, *self.waiting, *(s for s, _ in self.restoring), *self.finished]
        left = sum(left for _, left in self.restoring)
        return sum(s.generated_tokens for s in every_sequence), self.restores, -left

    def _boundary(self) -> None:
        oldest = min(self.waiting, key=lambda s: s.waits_since, default=None)
        turn = self._decide()
        for sequence in turn.suspend:
            self.running.remove(sequence)
            self._leave(sequence)
            advance(sequence, Event.SUSPEND, "pages lack")
            self._wait(sequence)
            self._leaves_device(sequence)
            self.suspensions += 1
        most = max((s.generated_tokens for s in self.running), default=0)
        assert all(s.generated_tokens >= most for s in turn.suspend), (
            "the sequences that have generated most are suspended first"
        )
        for sequence in turn.evict:
            self.ledger.release(sequence.sequence_id)
            self._leaves_device(sequence)
        for sequence, pages in turn.extend:
            self.ledger.resize(sequence.sequence_id, pages)
        for sequence, pages in turn.restore:
            self.waiting.remove(sequence)
            if self.ledger.holds(sequence.sequence_id):
                self.ledger.resize(sequence.sequence_id, pages)
                self._join([sequence])
                continue
            self.restores += 1
            prompt = self._prompt_of[sequence.sequence_id]
            self.ledger.add_prompt_pages(len(self.prompts.lacking(prompt)))
            self.prompts.enter(sequence.sequence_id, prompt)
            self.ledger.reserve(sequence.sequence_id, pages)
            self.restoring.append((sequence, self.restore_steps))
        assert not turn.restore or turn.restore[0][0] is oldest, "the sequence that waits longest is restored first"
        assert not set(map(id, turn.suspend)) & {id(s) for s, _ in turn.restore}, (
            "no sequence is suspended and restored at one boundary"
        )
        self.operations += len(turn.suspend) + len(turn.extend) + len(turn.restore)
        self._conserve()

    def _decide(self) -> Residency:
        return decide_residency(
            self.running,
            self.waiting,
            self.ledger,
            self.plan,
            prompts=self.prompts,
            pages_of=self._prompt_of.__getitem__,
            restoring=len(self.restoring),
        )

    def _step(self) -> None:
        self.restoring = [(s, left - 1) for s, left in self.restoring]
        self._join([s for s, left in self.restoring if left <= 0])
        for sequence in list(self.running):
            sequence.generated_tokens += 1
            held = self.ledger.held(sequence.sequence_id) + len(self._prompt_of[sequence.sequence_id])
            assert pages_for(sequence.kv_tokens, self.plan.page_size) <= held, "a running sequence never lacks a page"
            if sequence.generated_tokens >= sequence.max_new_tokens:
                advance(sequence, Event.FINISH, "length")
                self.running.remove(sequence)
                self._leave(sequence)
                self._ends(sequence)
        self._conserve()

    def _ends(self, sequence: SequenceState) -> None:
        self.finished.append(sequence)

    def _leave(self, sequence: SequenceState) -> None:
        self.ledger.release(sequence.sequence_id)
        self.ledger.add_prompt_pages(-len(self.prompts.leave(sequence.sequence_id)))

    def _join(self, arrived: Iterable[SequenceState]) -> None:
        for sequence in arrived:
            self.restoring = [(s, left) for s, left in self.restoring if s is not sequence]
            advance(sequence, Event.COMBINE_DECODE, "its KV is back")
            self.running.append(sequence)

    def _conserve(self) -> None:
        resident = [s for s in self.waiting if self.ledger.holds(s.sequence_id)]
        holders = [*self.running, *(s for s, _ in self.restoring), *resident]
        prompts = {page for s in holders for page in self._prompt_of[s.sequence_id]}
        assert self.ledger.prompt_pages == len(self.prompts) == len(prompts), "each prompt page counts once"
        own = sum(self.ledger.held(s.sequence_id) for s in holders)
        assert self.ledger.reserved_pages == own + len(prompts)
        assert 0 <= self.ledger.free_pages <= self.ledger.total_pages
        assert len(holders) - len(resident) <= self.most_holders
