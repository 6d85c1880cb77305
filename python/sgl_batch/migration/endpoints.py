"""Owns the means that both sides of a batch use on this rank: channel, transport and store."""

from __future__ import annotations

from dataclasses import dataclass

from sgl_batch.distributed.channel import Channel
from sgl_batch.distributed.transport import Transport
from sgl_batch.migration.messages import Message
from sgl_batch.migration.store import SequenceStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """This rank's channel, transport and store. A side gives up after `step_timeout_s` without progress."""

    channel: Channel[Message]
    transport: Transport
    store: SequenceStore
    step_timeout_s: float
