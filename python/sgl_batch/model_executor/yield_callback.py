"""Owns a user's callback at yield points (BatchGen 4.3): importing it, and the view of KV that it gets.

The layer runner calls it when a sub-batch yields after the attention of a layer. The callback may read and change that
layer's KV of the sub-batch's sequences; later passes read the changed KV, this pass's attention of the layer is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sgl_batch.config import BatchConfig
from sgl_batch.errors import ConfigError
from sgl_batch.named_function import find_function
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.scheduler import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class YieldedSequence:
    """A sequence of a sub-batch that yields. A prompt that is cut by sub-batches yields once for each piece.

    Attributes:
        request_id: SGLang's request id; each choice of a request has its own. None in a batch without ids.
        row: The sequence's request slot, its own while it runs: a key for state that the callback keeps.
        num_tokens: Tokens that have KV in the layer, those of this pass included.
        num_new: How many of these, the last ones, were computed in this pass.
    """

    request_id: str | None
    row: int
    num_tokens: int
    num_new: int


class YieldedKV:
    """The KV of one layer, of the sequences that yield. It is valid until the callback returns.

    Keys and values are [num_tokens, kv heads, head dim], in the pool's number type and on its device. With latent
    attention, keys are whole rows [num_tokens, 1, row] and values are their first channels. A change to a page that
    sequences share (prompts that begin alike, choices of one request) changes it for all of them.
    """

    def __init__(self, pool: KVPool, table: torch.Tensor, layer_id: int) -> None:
        self._pool, self._table, self._layer_id = pool, table, layer_id

    def get(self, sequence: YieldedSequence) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of a sequence's keys and values, in the order of its tokens."""
        keys, values = self._pool.read_kv(self._layer_id, self._kv_indices(sequence))
        return keys, values

    def set(self, sequence: YieldedSequence, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Replace a sequence's keys and values, those of all its tokens. With latent attention, only keys count."""
        assert len(keys) == len(values) == sequence.num_tokens, f"KV of {sequence.num_tokens} tokens is to be set"
        self._pool.write_kv(self._layer_id, self._kv_indices(sequence), keys, values)

    def _kv_indices(self, sequence: YieldedSequence) -> torch.Tensor:
        return self._table[sequence.row, : sequence.num_tokens].to(torch.int64)


OnYield = Callable[[Sequence[YieldedSequence], int, YieldedKV], None]
"""A user's callback: it gets the sequences that yield, the layer's number in the whole model, and the layer's KV.

It runs in the scheduler process, between two units of a pass: the step waits for it. An exception ends the engine. It
may be called for the same sequence again in the same layer, for another piece of its prompt.
"""


class YieldCallback:
    """Calls a user's callback for sub-batches whose KV is in the pages of `pool`.

    `table`: the request table, KV indices by request slot and position.
    """

    def __init__(self, on_yield: OnYield, pool: KVPool, table: torch.Tensor) -> None:
        self._on_yield, self._pool, self._table = on_yield, pool, table

    def __call__(self, forward_batch: ForwardBatch, index: int) -> None:
        """Call the callback for a sub-batch after a layer's attention; `index` counts from this process's first
        layer.
        """
        assert forward_batch.seq_lens_cpu is not None, "a batch over a graph's inputs has no lengths on the host"
        lengths = forward_batch.seq_lens_cpu.tolist()
        new = [1] * len(lengths) if forward_batch.forward_mode.is_decode() else forward_batch.extend_seq_lens_cpu
        assert new is not None, "an extend batch has the lengths of its sequences"
        ids: Sequence[str | None] = forward_batch.rids or [None] * len(lengths)
        sequences = [
            YieldedSequence(request_id=name, row=row, num_tokens=tokens, num_new=added)
            for name, row, tokens, added in zip(ids, forward_batch.req_pool_indices.tolist(), lengths, new, strict=True)
        ]
        layer_id = self._pool.start_layer + index
        self._on_yield(sequences, layer_id, YieldedKV(self._pool, self._table, layer_id))


def find_on_yield(name: str) -> OnYield:
    """Import the callback that `module:name` names. Raises ConfigError if that fails or it is not callable."""
    return find_function("on_yield", name, "sequences, layer and KV")


def make_yield_callback(config: BatchConfig, pool: KVPool, table: torch.Tensor) -> YieldCallback | None:
    """Return the user's callback at yield points, if there is one. Raises ConfigError if it cannot be used."""
    name, store_bytes = config.forward.on_yield, config.memory.kv_store_bytes
    if name is None:
        return None
    if store_bytes:
        raise ConfigError(
            f"on_yield is {name!r}, and kv_store_bytes is {store_bytes}: the host KV store keeps copies of KV, "
            "which the callback would not change; leave out on_yield or kv_store_bytes"
        )
    if not hasattr(pool, "write_kv"):
        raise ConfigError(
            f"on_yield is {name!r}, and this model keeps its KV in {type(pool).__name__}, which a callback cannot "
            "change: leave on_yield out"
        )
    return YieldCallback(find_on_yield(name), pool, table)
