"""Explores every run of the protocol's two tables: all orders of delivery, duplicates, timeouts, deaths at any point.

It uses nothing of the implementation but the tables. It judges ownership by what each side has done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from sgl_batch.migration.protocol import (
    RECEIVER_END_STATES,
    SENDER_END_STATES,
    ReceiverAction,
    ReceiverEvent,
    ReceiverState,
    ReceiverStep,
    SenderAction,
    SenderEvent,
    SenderState,
    SenderStep,
)

SenderTable = Mapping[tuple[SenderState, SenderEvent], SenderStep]
ReceiverTable = Mapping[tuple[ReceiverState, ReceiverEvent], ReceiverStep]

TO_RECEIVER = {SenderAction.SEND_COMMIT: ReceiverEvent.COMMIT, SenderAction.SEND_ABORT: ReceiverEvent.ABORT}
TO_SENDER = {
    ReceiverAction.SEND_ACCEPT: SenderEvent.ACCEPT,
    ReceiverAction.SEND_REFUSE: SenderEvent.REFUSE,
    ReceiverAction.SEND_STORED: SenderEvent.STORED,
    ReceiverAction.SEND_COMMITTED: SenderEvent.COMMITTED,
    ReceiverAction.SEND_ABORT: SenderEvent.ABORT,
}
SENDER_OWNS = {SenderState.OFFERED, SenderState.SENDING, SenderState.KEPT, SenderState.RECLAIMED}


class World(NamedTuple):
    """Both sides, the messages on their way, and the delivered messages, which may be delivered again."""

    sender: SenderState = SenderState.OFFERED
    receiver: ReceiverState = ReceiverState.AWAITING
    to_receiver: tuple[ReceiverEvent, ...] = (ReceiverEvent.OFFER,)
    to_sender: tuple[SenderEvent, ...] = ()
    seen_by_receiver: frozenset[ReceiverEvent] = frozenset()
    seen_by_sender: frozenset[SenderEvent] = frozenset()
    sender_alive: bool = True
    receiver_alive: bool = True
    death_known: bool = False
    data_begun: bool = False
    reserved: bool = False
    adoptions: int = 0
    releases: int = 0
    gave_up: bool = False
    duplicates_left: int = 2

    @property
    def both_live(self) -> bool:
        return self.sender_alive and self.receiver_alive


@dataclass(slots=True)
class Exploration:
    """The worlds that were reached, the table entries that were used, and the faults that were found."""

    worlds: set[World] = field(default_factory=set)
    sender_used: set[tuple[SenderState, SenderEvent]] = field(default_factory=set)
    receiver_used: set[tuple[ReceiverState, ReceiverEvent]] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


def explore(sender: SenderTable, receiver: ReceiverTable) -> Exploration:
    """Visit every world that can be reached, and note the rules that each of them breaks."""
    found = Exploration()
    pending = [World(), World(to_receiver=(), gave_up=True)]  # in the second the Offer could not be sent
    while pending:
        world = pending.pop()
        if world in found.worlds:
            continue
        found.worlds.add(world)
        found.faults += [f"{rule}: {world}" for rule in broken_rules(world)]
        pending.extend(_successors(world, sender, receiver, found))
    return found


def _successors(world: World, sender: SenderTable, receiver: ReceiverTable, found: Exploration) -> Iterator[World]:
    if world.sender_alive:
        yield from (_sender_step(after, event, sender, found) for after, event in _sender_events(world))
        for lost in range(len(world.to_receiver) + 1):  # the last messages may be lost with the process
            arriving = world.to_receiver[: len(world.to_receiver) - lost]
            yield world._replace(sender_alive=False, to_receiver=arriving, to_sender=())
    if world.receiver_alive:
        yield from (_receiver_step(after, event, receiver, found) for after, event in _receiver_events(world))
        for lost in range(len(world.to_sender) + 1):
            arriving = world.to_sender[: len(world.to_sender) - lost]
            yield world._replace(receiver_alive=False, to_sender=arriving, to_receiver=())


def _sender_events(world: World) -> Iterator[tuple[World, SenderEvent]]:
    delivers = not world.death_known  # once the death of a rank is known, none of its messages is delivered
    if world.to_sender and delivers:
        first, *rest = world.to_sender
        yield world._replace(to_sender=tuple(rest), seen_by_sender=world.seen_by_sender | {first}), first
    if world.duplicates_left and delivers:
        fewer = world._replace(duplicates_left=world.duplicates_left - 1)
        yield from ((fewer, event) for event in sorted(world.seen_by_sender, key=lambda event: event.name))
    if world.sender not in SENDER_END_STATES:
        yield world._replace(gave_up=True), SenderEvent.GIVE_UP
        if not world.receiver_alive:
            yield world._replace(death_known=True, to_sender=()), SenderEvent.PEER_DEAD


def _receiver_events(world: World) -> Iterator[tuple[World, ReceiverEvent]]:
    if world.receiver is ReceiverState.JUDGING:  # its own store answers at once
        yield from ((world, event) for event in (ReceiverEvent.FITS, ReceiverEvent.FULL))
        return
    delivers = not world.death_known
    if world.to_receiver and delivers:
        first, *rest = world.to_receiver
        yield world._replace(to_receiver=tuple(rest), seen_by_receiver=world.seen_by_receiver | {first}), first
    if world.duplicates_left and delivers:
        fewer = world._replace(duplicates_left=world.duplicates_left - 1)
        yield from ((fewer, event) for event in sorted(world.seen_by_receiver, key=lambda event: event.name))
    if world.receiver is ReceiverState.RECEIVING and world.data_begun:
        yield world, ReceiverEvent.ARRIVED
    if world.receiver not in RECEIVER_END_STATES:
        yield world._replace(gave_up=True), ReceiverEvent.GIVE_UP
        if not world.sender_alive:
            yield world._replace(death_known=True, to_receiver=()), ReceiverEvent.PEER_DEAD


def _sender_step(world: World, event: SenderEvent, table: SenderTable, found: Exploration) -> World:
    key = (world.sender, event)
    if key not in table:
        found.faults.append(f"the sender's table lacks {key}: {world}")
        return world
    found.sender_used.add(key)
    sent = tuple(TO_RECEIVER[action] for action in table[key].actions if action in TO_RECEIVER)
    return world._replace(
        sender=table[key].state,
        to_receiver=world.to_receiver + sent if world.receiver_alive else (),
        data_begun=world.data_begun or SenderAction.SEND_DATA in table[key].actions,
        releases=world.releases + (SenderAction.RELEASE in table[key].actions),
    )


def _receiver_step(world: World, event: ReceiverEvent, table: ReceiverTable, found: Exploration) -> World:
    key = (world.receiver, event)
    if key not in table:
        found.faults.append(f"the receiver's table lacks {key}: {world}")
        return world
    found.receiver_used.add(key)
    actions = table[key].actions
    sent = tuple(TO_SENDER[action] for action in actions if action in TO_SENDER)
    return world._replace(
        receiver=table[key].state,
        to_sender=world.to_sender + sent if world.sender_alive else (),
        reserved=(world.reserved or event is ReceiverEvent.FITS)
        and not {ReceiverAction.FREE, ReceiverAction.ADOPT} & set(actions),
        adoptions=world.adoptions + (ReceiverAction.ADOPT in actions),
    )


def broken_rules(world: World) -> list[str]:
    """Return the rules of ownership that do not hold in this world."""
    by_sender = world.sender in SENDER_OWNS
    by_receiver = world.receiver is ReceiverState.OWNED
    ended = world.sender in SENDER_END_STATES and world.receiver in RECEIVER_END_STATES
    under_way = bool(world.to_receiver or world.to_sender) or world.receiver in (
        ReceiverState.JUDGING,
        ReceiverState.RECEIVING,
    )
    travelling = world.sender is SenderState.COMMITTING and ReceiverEvent.COMMIT in world.to_receiver
    rules = {
        "while both live there is exactly one owner, if Commit on its way counts": not world.both_live
        or by_sender + by_receiver + (travelling and not by_receiver) == 1,
        "sequences that the sender has freed are owned by the receiver": world.sender is not SenderState.RELEASED
        or by_receiver,
        "sequences are adopted once, and only by their owner": world.adoptions == by_receiver,
        "sequences are freed once, and never by their owner": world.releases == (world.sender is SenderState.RELEASED),
        "a receiver that has ended holds no reservation": world.receiver not in RECEIVER_END_STATES
        or not world.reserved,
        "while both live, doubt ends when all messages have arrived": not world.both_live
        or under_way
        or (world.sender is not SenderState.COMMITTING and world.receiver is not ReceiverState.STORED),
        "when no side dies or gives up and nothing is under way, both have ended": not world.both_live
        or world.gave_up
        or under_way
        or ended,
        "a dead sender's batch has one owner": world.sender_alive
        or world.receiver not in RECEIVER_END_STATES
        or by_receiver + (world.sender is not SenderState.RELEASED and not by_receiver) == 1,
        "a dead receiver's batch has one owner, or was reclaimed": world.receiver_alive
        or world.sender not in SENDER_END_STATES
        or world.sender is SenderState.RECLAIMED
        or by_sender + by_receiver == 1,
        "sequences are reclaimed only from a dead receiver": world.sender is not SenderState.RECLAIMED
        or not world.receiver_alive,
    }
    return [rule for rule, holds in rules.items() if not holds]
