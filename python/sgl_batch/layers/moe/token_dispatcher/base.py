"""Owns the contract of the exchange between expert-parallel ranks; decides neither routing nor what experts compute.

Each rank has its own tokens (data-parallel attention) and a contiguous shard of the experts. `dispatch` brings to each
rank the rows that its experts must compute; `combine` brings the partial sums back to the ranks the tokens came from.
The ranks of a dispatcher's process group are the expert shards, in order: all of them have both parts.

Shape suffixes: T tokens of this rank, K experts per token, M hidden, R rows received, S rows sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from sgl_batch.errors import ConfigError

ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """The rows that this rank's experts must compute, ordered by source rank, then by token of the source.

    x_RM: in the type in which it was sent. Its rows are contiguous but may lie apart (stride(0) >= M).
    ids_RK: int32, LOCAL expert ids, -1 where the choice belongs to another rank (or to none).
    weights_RK: float32, without a meaning where ids_RK is -1 (0 or what the router gave).
    routes: what the implementation needs for `combine`; nobody else reads it.

    The tensors may be views of what was given to `dispatch` or of the dispatcher's buffers: read-only, and valid until
    the dispatcher's next `dispatch`.
    """

    x_RM: torch.Tensor
    ids_RK: torch.Tensor
    weights_RK: torch.Tensor
    routes: object


class TokenDispatcher(ABC):
    """One rank's end of the exchange. Every rank takes part in every call, in the same order, also without tokens.

    A token is sent once to each rank that has at least one of its experts, with all its choices. The number of
    collectives in a call is fixed. Wrong arguments raise ValueError before the first of them; the other ranks then wait
    in theirs until the group's timeout, so such an error ends the engine.

    At most one exchange is open: dispatch, combine, dispatch, ... Groups in flight together need a dispatcher each.
    """

    # Whether `combine` adds in float32 and in the order that it promises. The deterministic mode needs that.
    exact_order: ClassVar[bool] = True

    def __init__(self, *, shard: int, num_shards: int, num_experts: int, hidden_size: int) -> None:
        if num_experts < num_shards or num_experts % num_shards:
            raise ConfigError(
                f"{num_experts} experts cannot be shared out evenly among {num_shards} expert-parallel ranks; "
                f"choose a number of ranks that divides {num_experts}"
            )
        self.shard = shard
        self.num_shards = num_shards
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self._open: Received | None = None

    @property
    def num_local_experts(self) -> int:
        """How many experts each shard has; this rank's first is `shard * num_local_experts`."""
        return self.num_experts // self.num_shards

    def dispatch(self, x_TM: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor) -> Received:
        """Send this rank's tokens to the ranks of their experts, and return the rows that came for this rank's.

        topk_ids_TK: int32 or int64, global expert ids, none twice for a token, -1 for no expert. topk_weights_TK:
        float32. K, M and the type of x_TM are the same on all ranks, also on one without tokens. The arguments are
        free for reuse when `received` is no longer read.
        """
        self._check_tokens(x_TM, topk_ids_TK, topk_weights_TK)
        if self._open is not None:
            raise ValueError("dispatch was called twice without a combine; groups in flight need a dispatcher each")
        self._open = self._send_tokens(x_TM, topk_ids_TK, topk_weights_TK)
        return self._open

    def combine(self, partial_RM: torch.Tensor, received: Received) -> torch.Tensor:
        """Return the sums [T, M] in float32 of the partial sums that all ranks computed for this rank's tokens.

        partial_RM: float32, for each row of `received` the weighted sum of this rank's experts, 0 for a row without
        any. The ranks' partial sums are added in the order of a binary tree: a range of ranks is the sum of its first
        half and its second (the middle one of an odd number belongs to the first), and a rank that had no expert of a
        token counts as nothing. With a power of two of ranks this is the upper part of the same tree over all expert
        ids, so that experts added up in that order give the same bits on any such number of ranks, one included.
        A token without any expert gives 0. The result is the caller's.
        """
        if received is not self._open:
            raise ValueError("combine was given a Received that is not of this dispatcher's latest dispatch")
        _expect("partial_RM", partial_RM, shape=received.x_RM.shape, dtypes=(torch.float32,))
        _expect_device("partial_RM", partial_RM, received.x_RM.device)
        self._open = None
        return self._return_partials(partial_RM, received)

    def take_waited_s(self) -> float:
        """Seconds in which this rank waited for the others since this was last asked, as far as they can be told."""
        return 0.0

    @abstractmethod
    def _send_tokens(self, x_TM: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor) -> Received:
        """What `dispatch` promises, for arguments that have been checked."""

    @abstractmethod
    def _return_partials(self, partial_RM: torch.Tensor, received: Received) -> torch.Tensor:
        """What `combine` promises, for arguments that have been checked."""

    def _check_tokens(self, x_TM: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        if ids_TK.dim() != 2 or ids_TK.shape[1] == 0:
            raise ValueError(f"topk_ids_TK has shape {list(ids_TK.shape)}; it must be [tokens, experts per token]")
        _expect("topk_ids_TK", ids_TK, shape=ids_TK.shape, dtypes=(torch.int32, torch.int64))
        _expect("x_TM", x_TM, shape=(len(ids_TK), self.hidden_size), dtypes=ROW_DTYPES)
        _expect("topk_weights_TK", weights_TK, shape=ids_TK.shape, dtypes=(torch.float32,))
        _expect_device("topk_ids_TK", ids_TK, x_TM.device)
        _expect_device("topk_weights_TK", weights_TK, x_TM.device)
        self._check_ids(ids_TK)

    def _check_ids(self, ids_TK: torch.Tensor) -> None:
        outside_TK = (ids_TK < -1) | (ids_TK >= self.num_experts)
        if outside_TK.any():
            found = int(ids_TK[outside_TK][0])
            raise ValueError(f"topk_ids_TK holds {found}; experts are 0 to {self.num_experts - 1}, and -1 is none")


def _expect(name: str, tensor: torch.Tensor, *, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be {list(shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")


def _expect_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it must be on {device}")
