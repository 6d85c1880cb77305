"""The interface of the forms in which a rank keeps KV: on the device alone, or also in the host store.

A form carries out on requests what `core` has decided; the policy of each form is in `core.kv_policy`.
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
from sgl_batch.kv_offload.leased_store import LeasedStore
from sgl_batch.kv_offload.prompt_sharing import PromptSharing
from sgl_batch.sglang_adapter.types.batches import ScheduleBatch
from sgl_batch.sglang_adapter.types.requests import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Requests whose KV is on the device since the last call of `arrived`.

    `ready`: choices that have computed their prompt's last token on the device, and decode without a restore.
    `runners`: restored requests that can decode.
    `choices`: restored requests whose prompt's last token is still to be computed.
    """

    ready: list[Request] = field(default_factory=list)
    runners: list[Request] = field(default_factory=list)
    choices: list[Request] = field(default_factory=list)


class RankView(Protocol):
    """What a rank's executor contributes to `KVState`: all that is not KV."""

    @property
    def interval(self) -> Interval:
        """What was measured since the last boundary."""

    @property
    def choices(self) -> Sequence[SequenceState]:
        """Waiting sequences whose last prompt token is to be computed."""

    def runners(self) -> Sequence[SequenceState]:
        """Running sequences, with their tokens up to date."""

    def estimate_shared(self, sequences: Iterable[SequenceState]) -> None:
        """Set on each sequence how many tokens of its prompt it will share, if all are prefilled in this order."""


class KVForm(Protocol):
    """Keeps a rank's KV, and moves it between the tiers. A rank has one form, which one thread calls.

    The executor calls a form in the order of its actions: `match_and_insert` and `prefill` for a prefill group,
    `end_pass` and `settle` after each forward pass, `restore` and later `arrived` to bring KV to the device, `to_store`
    to suspend, `step` before each decode step. A request belongs to the form from `restore` until `arrived` returns it.

    `device`: the ledger of device pages. `admission`: the ledger in which an admitted sequence reserves all pages that
    it can need. `sharing`: the pages that prompts share. `leased`: what the rank has of a store that it shares with
    other ranks; None where it shares none.
    """

    device: PageLedger
    admission: PageLedger
    sharing: PromptSharing
    leased: LeasedStore | None

    @property
    def returning(self) -> Sequence[Request]:
        """Requests whose KV is being copied to the device, in the order of their `restore`."""

    def state(self, view: RankView) -> KVState:
        """Return what the policy decides from: the ledgers, the shared prompts, and the rank's view."""

    def match_and_insert(self, unit: Admission, leader: Request, plan: Plan) -> None:
        """Match an admitted unit's prompt with pages that others have, and reserve all pages that the unit can need.

        Args:
            unit: a sequence, or a leader and its followers. The caller admits it only where `admission` has room.
            leader: the request of the unit's leader.
            plan: the plan in force.
        """

    def prefill(
        self, requests: list[Request], pages: Sequence[int] | None, make_batch: Callable[[], ScheduleBatch]
    ) -> ScheduleBatch:
        """Return the batch of a prefill group, whose new KV goes where this form keeps it.

        The caller runs the batch as the next forward pass, and then calls `end_pass` and `settle`.

        Args:
            requests: the group, in the order of its rows.
            pages: how many device pages each request keeps, if the decision says that the group stays on the device;
                otherwise None.
            make_batch: makes the batch; the form calls it once, while the allocator gives the form's KV indices.
        """

    def fork(self, leader: Request, follower: Request) -> bool:
        """Let a choice begin with its leader's prompt, all but the last token.

        The caller calls it after the leader's forward pass, before the leader frees anything.

        Returns:
            Whether the choice can compute the prompt's last token at once. Otherwise it waits for `restore`.
        """

    def end_pass(self, batch: ScheduleBatch) -> None:
        """Complete the copies that ran during a forward pass. Called after it, before its results are processed."""

    def settle(self, batch: ScheduleBatch, requests: list[Request]) -> None:
        """Bring the KV of these unfinished requests to where it belongs. Called when a pass's results are processed."""

    def to_store(self, requests: list[Request]) -> None:
        """Move all KV of these requests from the device to the store, and free their device pages.

        Blocks until the KV is in the store. The requests leave SGLang's table of running requests.
        """

    def restore(self, request: Request) -> None:
        """Begin to copy a waiting request's KV to device pages, which the caller has reserved in `device`.

        The request is the form's until `arrived` returns it.
        """

    def arrived(self, *, wait: bool) -> Arrived:
        """Return the requests whose KV has come to the device since the last call, in the order of their `restore`.

        Args:
            wait: whether to block until every copy to the device has ended.

        Raises:
            CopyError: a copy failed.
        """

    def prepare_to_run(self, requests: list[Request]) -> None:
        """Prepare waiting requests that are about to join the decode group without a restore."""

    def step(self, running: ScheduleBatch, plan: Plan) -> None:
        """Make the decode batch ready for its next step: a KV index for each sequence's next token."""

    def stream(self, *, on: bool) -> None:
        """Let decode steps stream KV from the store from now on, or read it on the device. No sequence is running."""

    def give_up(self, request: Request) -> None:
        """Free all KV of a request, on the device and in the store. Its tokens stay."""

    def forget(self, name: str) -> None:
        """Free what an ended sequence still has: all but its request's device pages and its reservations."""

    def sync(self, *, wait: bool) -> None:
        """Complete the copies to the store that have ended, or all if `wait`. Raises CopyError if one failed."""

    def counts(self) -> dict[str, int]:
        """Return the store's figures for statistics; empty without a store."""
