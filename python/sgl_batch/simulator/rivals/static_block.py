"""Decides as engines do that stream weights for small memory: a block of sequences is computed to its end.

What a pass takes is not decided here: whether its weights come over PCIe once for a block of several GPU batches
(FlexGen's zig-zag schedule), and whether KV lies in the host, are settings of the engine's costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from sgl_batch.core.actions import Actions, BeginInterval, Idle, Prefill, Refill, Step
from sgl_batch.core.admission import Admission, select_prefill_group
from sgl_batch.core.kv_state import KVState
from sgl_batch.core.page_boundary import State
from sgl_batch.core.plan import Plan
from sgl_batch.simulator.rank import SimulatedRank


class StaticBlock:
    """Prefills up to `plan.decode.b_moe` sequences that fit with all that they may generate, then decodes them.

    Nothing joins a block that runs. (FlexGen pads the prompts of a block and computes each output to the longest one;
    here sequences that end leave, which is to its favour.)
    """

    is_local = True

    def next(self, state: State, kv: KVState, plan: Plan) -> Actions:
        if state.running:
            return (BeginInterval(), Step())
        more = plan.decode.b_moe - len(state.ready)
        if state.queued and more > 0:
            units = select_prefill_group(
                (Admission(leader=one) for one in islice(state.queued, more)),
                kv.admission,
                b_moe=plan.prefill.b_moe,
                free_request_slots=state.free_request_slots,
                plan=plan,
            )
            if units:
                return (Prefill(units=tuple(units)),)
        if state.ready:
            return (Refill(sequences=tuple(state.ready)), BeginInterval(), Step())
        return (Idle(),)

    def meet(self, ranks: Sequence[SimulatedRank]) -> bool:
        return False
