"""Owns what both sides of a batch work with on this rank; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.distributed.channel import Channel
from sgl_batch.distributed.transport import Transport
from sgl_batch.migration.messages import Message
from sgl_batch.migration.store import SequenceStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """This rank's end of the wires, and its store. A step of the protocol that takes `step_timeout_s` is given up."""

    channel: Channel[Message]
    transport: Transport
    store: SequenceStore
    step_timeout_s: float
