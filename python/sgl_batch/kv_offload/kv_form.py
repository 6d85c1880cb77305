"""The interface of the forms in which a rank keeps KV: on the device alone, or also in the host store.

A form carries out what `core` has decided, on requests; which form decides what is in `core.kv_policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sgl_batch.core.admission import Admission
from sgl_batch.core.kv_state import Interval, KVState
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.plan import Plan
from sgl_batch.core.sequence import SequenceState
from sgl_batch.kv_offload.prompt_sharing import PromptSharing
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Requests whose KV has come to the device: those that can decode, and choices whose last token is to be computed.

    `ready`: requests of READY sequences that decode at once, without having been restored.
    """

    ready: list[Request] = field(default_factory=list)
    runners: list[Request] = field(default_factory=list)
    choices: list[Request] = field(default_factory=list)


class RankView(Protocol):
    """What `KVState` shows of a rank beside its KV: the executor has it."""

    @property
    def interval(self) -> Interval:
        """What was measured since the last boundary."""

    @property
    def choices(self) -> Sequence[SequenceState]:
        """Waiting sequences whose last prompt token is to be computed."""

    def runners(self) -> Sequence[SequenceState]:
        """Running sequences, with their tokens up to date."""

    def estimate_shared(self, sequences: Iterable[SequenceState]) -> None:
        """Note of sequences, prefilled in this order, what their prompts share."""


class KVForm(Protocol):
    """`device` and `admission` are the accounts that `KVState` shows; `sharing` has what prompts share.

    `returning`: requests whose KV is on its way to the device. Until `arrived` has given them back they are the form's.
    """

    device: PageLedger
    admission: PageLedger
    sharing: PromptSharing

    @property
    def returning(self) -> Sequence[Request]:
        """Requests whose KV is on its way to the device."""

    def state(self, view: RankView) -> KVState:
        """Where KV lies now."""

    def match_and_insert(self, unit: Admission, leader: Request, plan: Plan) -> None:
        """Reserve all pages that an admitted unit can need. `leader`: the request of its leader."""

    def prefill(
        self, requests: list[Request], pages: Sequence[int] | None, make_batch: Callable[[], ScheduleBatch]
    ) -> ScheduleBatch:
        """The batch of a prefill group, made by `make_batch` while new KV goes where this form wants it.

        `pages`: how many of the device each request keeps, where the decision says that they stay there.
        """

    def fork(self, leader: Request, follower: Request) -> bool:
        """Let a choice begin behind its leader's prompt; whether it can compute the last token at once, or waits."""

    def end_pass(self, batch: ScheduleBatch) -> None:
        """A forward pass is over: complete the copies that went beside it, before its results are processed."""

    def settle(self, batch: ScheduleBatch, requests: list[Request]) -> None:
        """The results of a pass are processed: bring the KV of these unfinished requests to where it is to lie."""

    def to_store(self, requests: list[Request]) -> None:
        """Move all KV of these requests from the device to the store; it is there when this returns."""

    def restore(self, request: Request) -> None:
        """Begin to copy a waiting request's KV to pages of the device, which are reserved."""

    def arrived(self, *, wait: bool) -> Arrived:
        """Requests whose KV has come since this was asked, in their order; of all on their way, if `wait`."""

    def prepare_to_run(self, requests: list[Request]) -> None:
        """Waiting requests are about to join the decode group with their KV where it lies."""

    def step(self, running: ScheduleBatch, plan: Plan) -> None:
        """Make the decode batch ready for its next step."""

    def stream(self, *, on: bool) -> None:
        """Let decode steps find their KV in the store from now on, or on the device. Nothing runs."""

    def give_up(self, request: Request) -> None:
        """Let a request lose all KV that it has, or has found; it keeps what it has generated."""

    def forget(self, name: str) -> None:
        """A sequence has ended: free what is its own beside what its request and the accounts gave back."""

    def sync(self, *, wait: bool) -> None:
        """Complete the copies to the store that have ended; all of them, if `wait`."""

    def counts(self) -> dict[str, int]:
        """What the store has, for statistics; nothing where there is none."""
