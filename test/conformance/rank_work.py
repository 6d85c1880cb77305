"""Owns the functions that each rank runs for the dispatcher tests, in its own process; tests check their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from dispatch_cases import Case
from dispatch_reference import expert_sum
from message_exchange import SOON_S, MessageExchange

from sgl_batch.core.topology import Topology
from sgl_batch.distributed.group_transport import GroupTransport
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.distributed.zmq_channel import ZmqChannel
from sgl_batch.layers.moe.token_dispatcher import Received, TokenDispatcher, create_token_dispatcher
from sgl_batch.layers.moe.token_dispatcher.row_mailbox import RowMailbox, RowsHeader
from sgl_batch.layers.moe.token_dispatcher.staged import StagedDispatcher

# One dispatcher for all cases of the same sizes, so that its buffers hold rows of earlier cases.
_dispatchers: dict[tuple[object, ...], TokenDispatcher] = {}


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """The rows that one rank received and the outputs of its tokens, on the CPU."""

    x_RM: torch.Tensor
    ids_RK: torch.Tensor
    weights_RK: torch.Tensor
    out_TM: torch.Tensor
    exact: bool


def make_dispatcher(
    name: str, group: dist.ProcessGroup | None, *, num_experts: int, hidden_size: int
) -> TokenDispatcher:
    """Return the dispatcher of a name. `staged` is for ranks that share a GPU; here it copies between host memory."""
    if name != "staged":
        return create_token_dispatcher(name, group, num_experts=num_experts, hidden_size=hidden_size)
    through = create_token_dispatcher("shared", group, num_experts=num_experts, hidden_size=hidden_size)
    return StagedDispatcher(through, torch.device("cpu"))


def _dispatcher(group: dist.ProcessGroup | None, name: str, case: Case) -> TokenDispatcher:
    key = (group, name, case.num_experts, case.hidden_size)
    if key not in _dispatchers:
        _dispatchers[key] = make_dispatcher(name, group, num_experts=case.num_experts, hidden_size=case.hidden_size)
    return _dispatchers[key]


def _shard(dispatcher: TokenDispatcher, name: str, case: Case) -> list[torch.Tensor]:
    device = "cuda" if name in ("nccl", "deepep") else "cpu"
    return [part.to(device) for part in case.shard(dispatcher.shard, dispatcher.num_shards)]


def _partial(dispatcher: TokenDispatcher, received: Received) -> torch.Tensor:
    num_local = dispatcher.num_local_experts
    return expert_sum(received.x_RM, received.ids_RK, received.weights_RK, dispatcher.shard * num_local, num_local)


def exchange(group: dist.ProcessGroup | None, name: str, case: Case) -> Exchanged:
    """Dispatch this rank's tokens, compute their experts and combine."""
    dispatcher = _dispatcher(group, name, case)
    received = dispatcher.dispatch(*_shard(dispatcher, name, case))
    got = [part.cpu().clone() for part in (received.x_RM, received.ids_RK, received.weights_RK)]
    out_TM = dispatcher.combine(_partial(dispatcher, received), received)
    return Exchanged(x_RM=got[0], ids_RK=got[1], weights_RK=got[2], out_TM=out_TM.cpu(), exact=dispatcher.exact_order)


def _num_collectives(group: dist.ProcessGroup | None) -> int:
    """Return the number of collectives that the group has run."""
    return 0 if group is None else group._get_sequence_number_for_group()


def count_collectives(group: dist.ProcessGroup | None, name: str, case: Case) -> tuple[int, int]:
    """Return the number of collectives of a dispatch and of a combine."""
    dispatcher = _dispatcher(group, name, case)
    shard = _shard(dispatcher, name, case)
    begun = _num_collectives(group)
    received = dispatcher.dispatch(*shard)
    dispatched = _num_collectives(group)
    dispatcher.combine(_partial(dispatcher, received), received)
    return dispatched - begun, _num_collectives(group) - dispatched


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def dispatch_with_fault(group: dist.ProcessGroup | None, name: str, case: Case, fault: str) -> tuple[str, int]:
    """Return the error of dispatch for arguments with this fault, and the number of collectives before it."""
    dispatcher = _dispatcher(group, name, case)
    x_TM, ids_TK, weights_TK = _shard(dispatcher, name, case)
    faulty = {
        "x too narrow": (x_TM[:, 1:], ids_TK, weights_TK),
        "x of integers": (x_TM.to(torch.int32), ids_TK, weights_TK),
        "x one token short": (x_TM[1:], ids_TK, weights_TK),
        "ids of one dimension": (x_TM, ids_TK[:, 0], weights_TK),
        "no choices": (x_TM, ids_TK[:, :0], weights_TK[:, :0]),
        "ids of floats": (x_TM, ids_TK.to(torch.float32), weights_TK),
        "weights for fewer choices": (x_TM, ids_TK, weights_TK[:, 1:]),
        "weights in bfloat16": (x_TM, ids_TK, weights_TK.to(torch.bfloat16)),
        "weights elsewhere": (x_TM, ids_TK, weights_TK.to("meta")),
        "expert too high": (x_TM, ids_TK + case.num_experts, weights_TK),
        "expert below -1": (x_TM, ids_TK - case.num_experts - 2, weights_TK),
    }[fault]
    begun = _num_collectives(group)
    refusal = _refusal(lambda: dispatcher.dispatch(*faulty))
    return refusal, _num_collectives(group) - begun


def combine_with_fault(group: dist.ProcessGroup | None, name: str, case: Case, fault: str) -> tuple[str, int]:
    """Return the error of combine for this fault and the collectives before it; then end the exchange."""
    dispatcher = _dispatcher(group, name, case)
    received = dispatcher.dispatch(*_shard(dispatcher, name, case))
    partial_RM = _partial(dispatcher, received)
    faulty = {
        "one row more": (torch.cat((partial_RM, partial_RM[:1].new_zeros(1, case.hidden_size))), received),
        "too narrow": (partial_RM[:, 1:], received),
        "in bfloat16": (partial_RM.to(torch.bfloat16), received),
        "elsewhere": (partial_RM.to("meta"), received),
        "another exchange's": (partial_RM, replace(received)),
    }[fault]
    begun = _num_collectives(group)
    refusal = _refusal(lambda: dispatcher.combine(*faulty))
    taken = _num_collectives(group) - begun
    dispatcher.combine(partial_RM, received)
    return refusal, taken


def dispatch_twice(group: dist.ProcessGroup | None, name: str, case: Case) -> tuple[str, int]:
    """Return the error of a second dispatch without a combine and its collectives; then end the exchange."""
    dispatcher = _dispatcher(group, name, case)
    shard = _shard(dispatcher, name, case)
    received = dispatcher.dispatch(*shard)
    begun = _num_collectives(group)
    refusal = _refusal(lambda: dispatcher.dispatch(*shard))
    taken = _num_collectives(group) - begun
    dispatcher.combine(_partial(dispatcher, received), received)
    return refusal, taken


def dispatch_mismatched(group: dist.ProcessGroup, name: str, case: Case, first_ranks: Case) -> str:
    """Return the error of a new dispatcher or its dispatch when the first rank exchanges tokens of another case."""
    own = first_ranks if group.rank() == 0 else case

    def begin() -> None:
        dispatcher = make_dispatcher(name, group, num_experts=own.num_experts, hidden_size=own.hidden_size)
        dispatcher.dispatch(*_shard(dispatcher, name, own))

    return _refusal(begin)


def exchange_in_both_modes(group: dist.ProcessGroup | None, name: str, cases: tuple[Case, ...]) -> list[torch.Tensor]:
    """Return the outputs of cases by one dispatcher, of the first in torch's inference mode, of the others outside."""
    dispatcher = make_dispatcher(name, group, num_experts=cases[0].num_experts, hidden_size=cases[0].hidden_size)
    outputs = []
    for number, case in enumerate(cases):
        with torch.inference_mode(number == 0):
            received = dispatcher.dispatch(*_shard(dispatcher, name, case))
            outputs.append(dispatcher.combine(_partial(dispatcher, received), received).cpu())
    return outputs


def exchange_both_ways(
    group: dist.ProcessGroup, name: str, case: Case, directory: str
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the outputs of this rank's tokens by messages and by collectives. All processes are ranks of `group`."""
    ranks, rank, rendezvous = list(range(group.size())), group.rank(), Rendezvous(Path(directory))
    transport = GroupTransport(dist.new_group(ranks), ranks)
    path = rendezvous.directory / f"rows-{rank}"
    with ZmqChannel[RowsHeader](rank=rank, messages=RowsHeader, run_id="rows", path=path) as channel:
        rendezvous.publish("rows", rank, channel.endpoint)
        channel.connect(rendezvous.await_all("rows", ranks, SOON_S))
        mailbox = RowMailbox(channel, transport, [peer for peer in ranks if peer != rank])
        by_messages = MessageExchange(Topology.uniform(len(ranks)), rank, mailbox, case).run()
        by_collectives = exchange(group, name, case).out_TM
    return by_messages, by_collectives
