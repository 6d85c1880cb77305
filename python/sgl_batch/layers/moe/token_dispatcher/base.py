"""Owns the contract of the exchange of tokens between expert-parallel ranks. Routing and expert compute are elsewhere.

Each rank has its own tokens (data-parallel attention) and a contiguous shard of the experts. `dispatch` sends tokens to
the ranks that hold their experts; `combine` sends the partial sums back and adds them up:

    rank 0:  tokens --dispatch-->  rows for shard 0 --experts--> partial sums --combine--> sums of its tokens
                        X                                               X
    rank 1:  tokens --dispatch-->  rows for shard 1 --experts--> partial sums --combine--> sums of its tokens

The ranks of a dispatcher's process group are the expert shards, in order. Every rank has tokens and experts.

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

    The tensors may be views of the arguments of `dispatch`, or of the dispatcher's buffers. They are read-only, and
    valid until the dispatcher's next `dispatch`.

    Attributes:
        x_RM: Rows in the number type in which they were sent. Each row is contiguous; rows may lie apart
            (stride(0) >= M).
        ids_RK: int32, LOCAL expert ids; -1 for a choice of another rank's expert, or of none.
        weights_RK: float32, the weights of the choices; meaningless where ids_RK is -1.
        routes: The implementation's own data for `combine`; only the dispatcher reads it.
    """

    x_RM: torch.Tensor
    ids_RK: torch.Tensor
    weights_RK: torch.Tensor
    routes: object


class TokenDispatcher(ABC):
    """One rank's end of the exchange.

    Each call is collective: every rank of the group makes the same calls in the same order, also without tokens. The
    number of collectives in a call is fixed. A token is sent once to each rank that has at least one of its experts,
    with all its choices.

    One exchange is open at a time: dispatch, combine, dispatch, ... Groups that are in flight together need one
    dispatcher each. A dispatcher is used by one thread.

    An implementation overrides `_send_tokens` and `_return_partials`.
    """

    # Whether `combine` adds in float32 and in the order that it promises. The deterministic mode needs both.
    exact_order: ClassVar[bool] = True

    def __init__(self, *, shard: int, num_shards: int, num_experts: int, hidden_size: int) -> None:
        """Set the sizes of the exchange.

        Args:
            shard: This rank's index in the group.
            num_shards: The number of ranks in the group.
            num_experts: The experts of all ranks together.
            hidden_size: M, the same on all ranks.

        Raises:
            ConfigError: The experts cannot be divided evenly among the ranks.
        """
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
        """The number of experts of each shard; this rank's first expert is `shard * num_local_experts`."""
        return self.num_experts // self.num_shards

    def dispatch(self, x_TM: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor) -> Received:
        """Send this rank's tokens to the ranks of their experts, and return the rows for this rank's experts.

        K, M and the number type of x_TM must be the same on all ranks, also on a rank without tokens (T = 0).

        Args:
            x_TM: Tokens, in float32, bfloat16 or float16.
            topk_ids_TK: int32 or int64, GLOBAL expert ids; no id twice for a token; -1 for no expert.
            topk_weights_TK: float32, the weights of the choices.

        Returns:
            The received rows. The caller passes them to `combine`. It may overwrite the arguments when it no longer
            reads the received rows.

        Raises:
            ValueError: An argument is wrong, or an exchange is open. It is raised before the first collective; the
                other ranks then wait in theirs until the group's timeout, so that such an error ends the engine.
        """
        self._check_tokens(x_TM, topk_ids_TK, topk_weights_TK)
        if self._open is not None:
            raise ValueError("dispatch was called twice without a combine; groups in flight need a dispatcher each")
        self._open = self._send_tokens(x_TM, topk_ids_TK, topk_weights_TK)
        return self._open

    def combine(self, partial_RM: torch.Tensor, received: Received) -> torch.Tensor:
        """Return the partial sums to the tokens' ranks, and add up those of this rank's tokens.

        The ranks' partial sums are added in the order of a binary tree: a range of ranks is the sum of its first half
        and its second half (the middle one of an odd number belongs to the first), and a rank without an expert of a
        token counts as nothing. With a power of two of ranks this is the upper part of the same tree over all expert
        ids: experts that are added up in that order give the same bits on any such number of ranks, one included.

        Args:
            partial_RM: float32, for each row of `received` the weighted sum of this rank's experts, 0 for a row without
                one. The caller does not use it afterwards.
            received: The result of this dispatcher's latest `dispatch`.

        Returns:
            The sums [T, M] in float32, 0 for a token without an expert. They are the caller's.

        Raises:
            ValueError: `received` is not of the latest `dispatch`, or `partial_RM` does not fit it. See `dispatch`.
        """
        if received is not self._open:
            raise ValueError("combine was given a Received that is not of this dispatcher's latest dispatch")
        _expect("partial_RM", partial_RM, shape=received.x_RM.shape, dtypes=(torch.float32,))
        _expect_device("partial_RM", partial_RM, received.x_RM.device)
        self._open = None
        return self._return_partials(partial_RM, received)

    def take_waited_s(self) -> float:
        """Return the seconds that this rank waited for other ranks since the last call, as far as they are measured."""
        return 0.0

    @abstractmethod
    def _send_tokens(self, x_TM: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor) -> Received:
        """Implement `dispatch` for checked arguments."""

    @abstractmethod
    def _return_partials(self, partial_RM: torch.Tensor, received: Received) -> torch.Tensor:
        """Implement `combine` for checked arguments."""

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
