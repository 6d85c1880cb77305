"""Callbacks for yield points that fail, as a fault of the program or of the machine ends a scheduler process."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from sgl_batch.model_executor.yield_callback import YieldedKV, YieldedSequence

RAISES_AT = 5
FAULT = "no kernel takes this layer"


def fail(sequences: Sequence[YieldedSequence], layer: int, kv: YieldedKV) -> None:
    """Fail at a sequence of RAISES_AT tokens."""
    if layer > 0 and any(sequence.num_tokens == RAISES_AT for sequence in sequences):
        raise ZeroDivisionError(FAULT)


def __getattr__(name: str) -> object:
    """Fail when a scheduler looks up its callback, which it does after it has loaded the model."""
    if name == "raise_at_start":
        raise ZeroDivisionError(FAULT)
    if name == "be_killed_at_start":
        os.kill(os.getpid(), signal.SIGKILL)
    raise AttributeError(name)
