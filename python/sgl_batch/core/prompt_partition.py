"""Decides when all ranks of an engine compute one long prompt together (BatchGen 4.2, partition).

Theory of operation. All ranks prefill at the same boundaries. Where only one of them has a prompt to compute, the
others would wait for its pass. They can share it instead: each gets a replica of the prompt, and the pass has the same
rows on all ranks, as a decode step of a partition has. No KV moves, because each rank computes the prompt's KV. The
partition ends with the pass: replicas are dropped, and the sequence goes on where it is owned.

The columns of each product are gathered, so that a short prompt may be faster alone. The plan says from which length on
prompts are shared or, where it does not, the measured cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from sgl_batch.core.actions import Partition, Prefill
from sgl_batch.core.page_boundary import BoundaryAction
from sgl_batch.core.page_ledger import pages_for
from sgl_batch.core.partition_costs import PartitionCosts
from sgl_batch.core.plan import Plan
from sgl_batch.core.rank_state import RankState
from sgl_batch.core.sequence import SequenceState


def shared_prompt(
    ranks: Sequence[RankState], parts: Sequence[BoundaryAction], plan: Plan, costs: PartitionCosts | None = None
) -> tuple[Partition, ...]:
    """Return the partition of the only prompt that a prefill phase computes; empty if its rank computes it alone.

    Args:
        ranks: the state of each rank, by rank. No rank is partitioned.
        parts: by rank, its part in the phase: Prefill, or Idle for a rank without prompts.
        plan: the plan in force.
        costs: measured seconds of passes; None if they are not known.
    """
    prompt = _only_prompt(parts)
    least = plan.partition_prompt_tokens or (0 if costs is None else costs.least_prompt_tokens)
    if prompt is None or not least or prompt.prompt_tokens < least or len(ranks) < 2:
        return ()
    if not all(rank.takes_replicas for rank in ranks):
        return ()
    others = (rank for rank, part in zip(ranks, parts, strict=True) if not isinstance(part, Prefill))
    if not all(_takes(rank, prompt, plan) for rank in others):
        return ()
    return (Partition(sequences=(prompt,), ranks=frozenset(range(len(ranks)))),)


def _only_prompt(parts: Sequence[BoundaryAction]) -> SequenceState | None:
    """Return the prompt that is all that a prefill phase computes, from its first token on; None if there is more."""
    computing = [part for part in parts if isinstance(part, Prefill)]
    if len(computing) != 1 or computing[0].rest is not None or len(computing[0].units) != 1:
        return None
    leader = computing[0].units[0].leader
    return None if leader.generated_tokens or leader.shared_tokens else leader


def _takes(rank: RankState, prompt: SequenceState, plan: Plan) -> bool:
    """Return whether a rank has room for a replica of a prompt, which ends with the first token."""
    fits = pages_for(prompt.prompt_tokens, plan.page_size) <= rank.room_for_replicas
    return fits and not rank.has_waiting and rank.state.free_request_slots > 0
