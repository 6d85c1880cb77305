"""Owns the exchange through memory that the ranks of one machine share, for tokens in host memory.

A token is written once, into its rank's region, and every rank copies the rows that its experts need from there; no
counts are exchanged first. The native kernels do it, with two waits for the other ranks: one in dispatch, one in
combine.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from sgl_batch.distributed.shared_memory import gathered, shared_regions, spin_us
from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.moe.token_dispatcher.base import Received, TokenDispatcher

# Address space of each rank's region; only written parts take memory.
_REGION_BYTES = 32 << 30
# The heartbeat ends a wait for a lost rank; this is the last resort.
_TIMEOUT_S = 1800.0


class SharedDispatcher(TokenDispatcher):
    """Exchanges rows through shared memory. `x_RM` lies in this rank's region: the next `dispatch` overwrites it."""

    def __init__(self, group: dist.ProcessGroup, *, num_experts: int, hidden_size: int) -> None:
        """Share the ranks' regions; every rank of `group` calls this. Raises ConfigError without the native kernels."""
        super().__init__(shard=group.rank(), num_shards=group.size(), num_experts=num_experts, hidden_size=hidden_size)
        kernels = native_kernels()
        if kernels is None:
            raise ConfigError(
                "the token dispatcher shared needs the native kernels, which cannot be loaded (see the warning above); "
                "run scripts/install, or choose --token-dispatcher gloo"
            )
        _expect_same_on_all(group, num_experts, hidden_size)
        self._kernels = kernels
        self._regions = shared_regions(group, _REGION_BYTES)
        self._spin_us = spin_us(group.size())
        self._waited_s = 0.0

    def take_waited_s(self) -> float:
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def _check_ids(self, ids_TK: torch.Tensor) -> None:
        """The kernel checks ids."""

    def _send_tokens(self, x_TM: torch.Tensor, topk_ids_TK: torch.Tensor, topk_weights_TK: torch.Tensor) -> Received:
        x_RM, ids_RK, weights_RK, waited_s = self._kernels.exchange_dispatch(
            self._regions,
            self.shard,
            x_TM.contiguous(),
            topk_ids_TK.to(torch.int32).contiguous(),
            topk_weights_TK.contiguous(),
            num_experts=self.num_experts,
            spin_us=self._spin_us,
            timeout_s=_TIMEOUT_S,
        )
        self._waited_s += waited_s
        return Received(x_RM=x_RM, ids_RK=ids_RK, weights_RK=weights_RK, routes=len(x_TM))

    def _return_partials(self, partial_RM: torch.Tensor, received: Received) -> torch.Tensor:
        out_TM, waited_s = self._kernels.exchange_combine(
            self._regions,
            self.shard,
            partial_RM.contiguous(),
            num_tokens=received.routes,
            spin_us=self._spin_us,
            timeout_s=_TIMEOUT_S,
        )
        self._waited_s += waited_s
        result: torch.Tensor = out_TM
        return result


def _expect_same_on_all(group: dist.ProcessGroup, num_experts: int, hidden_size: int) -> None:
    """Raise ValueError if the ranks' sizes differ. Ranks with different sizes share no memory to find it out later."""
    for peer, (experts, hidden) in enumerate(gathered(group, [num_experts, hidden_size])):
        if (experts, hidden) != (num_experts, hidden_size):
            raise ValueError(
                f"rank {peer} exchanges rows of {hidden} numbers among {experts} experts, and rank {group.rank()} of "
                f"{hidden_size} among {num_experts}; all ranks must give the same"
            )
