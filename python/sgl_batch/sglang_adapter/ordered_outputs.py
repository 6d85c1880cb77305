"""Adapts the messages with which SGLang's schedulers answer to core/output_order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from sgl_batch.core.output_order import OutputOrder, Part
from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    from sglang.srt.managers.io_struct import BatchTokenIDOutput

__all__ = ["ReceivedInOrder", "parts_of"]


def parts_of(message: object) -> list[Part]:
    """Return the parts of answers in a message of a scheduler; none in one that has no tokens."""
    if not isinstance(message, BatchTokenIDOutput) or message.output_ids is None:
        return []
    return [
        Part(request_id=rid, start=end - len(tokens), end=end, is_last=reason is not None)
        for rid, tokens, end, reason in zip(
            message.rids, message.output_ids, message.completion_tokens, message.finished_reasons, strict=True
        )
    ]


class ReceivedInOrder:
    """Receives from a socket as `receive` does, except that parts of answers come in order. Each has one socket."""

    def __init__(self, receive: Callable[..., Any]) -> None:
        self._receive = receive
        self._order: OutputOrder[Any] = OutputOrder()
        self._ready: deque[Any] = deque()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        while not self._ready:
            message = self._receive(*args, **kwargs)
            self._ready.extend(self._order.take(message, parts_of(message)))
        return self._ready.popleft()
