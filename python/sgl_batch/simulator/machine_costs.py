"""Owns the costs of this machine's engine, from its profile: of one rank, or of several that share the cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sgl_batch.planner.pass_cost import STEP, PassCost, PassTime
from sgl_batch.planner.roofline import OVERHEAD
from sgl_batch.simulator.work import PassWork


@dataclass(slots=True)
class MachineCosts:
    """Costs by the fitted profile of one machine, whose cores all ranks share.

    Attributes:
        passes: Of a plan's passes, whose decode steps find their KV on the device.
        streamed: Of the same plan's passes, whose decode steps read their KV from the store; None without one.
        ranks: How many share the machine: each has as large a part of the cores.
        sources: As in `Costs`.
    """

    passes: PassCost
    streamed: PassCost | None = None
    ranks: int = 1
    sources: Mapping[str, str] = field(default_factory=lambda: {"all": "the profile of this machine"})

    def of_pass(self, work: PassWork) -> PassTime:
        """Return the time of a pass: the rows of all ranks by all cores, as if each had as many as the busiest."""
        rows, tokens = work.rows * self.ranks, work.prompt_tokens * self.ranks
        context = work.kv_tokens / max(work.rows, 1)
        if not tokens:
            return (self.streamed if work.streams and self.streamed else self.passes).decode(max(rows, 1), context)
        read = work.prompts * self.ranks
        prompts = self.passes.prefill_of(tokens, work.prompt_pairs * self.ranks, prompts=read)
        return self._mixed(prompts, rows, context, tokens, read) if rows else prompts

    def _mixed(self, prompts: PassTime, rows: int, context: float, tokens: int, read: int) -> PassTime:
        """Return the time of a pass with prompts and decoded sequences: attention of both, experts of all rows.

        `read`: the rows of the prompts that the last layer's experts compute.
        """
        decode, alone = self.passes.decode(rows, context), self.passes.prefill_group(tokens, tokens, read=read)
        whole = self.passes.prefill_group(tokens + rows, tokens, read=read + rows)
        parts = prompts.parts.copy()
        for name in whole.parts:
            parts[name] += whole.parts[name] - alone.parts[name]
        more_s = sum(decode.parts[name] for name in ("attention", STEP))
        parts["attention"] += decode.parts["attention"]
        parts[STEP] += decode.parts[STEP]
        bounds = prompts.bounds.copy()
        bounds[OVERHEAD] += more_s
        return replace(prompts, parts=parts, bounds=bounds)

    def of_copy(self, tokens: float) -> PassTime:
        return self.passes.restore(tokens)

    def of_move(self, tokens: float) -> PassTime:
        """Return the time of a move through memory, as long as that of a copy to the store."""
        return self.passes.restore(tokens)

    def of_boundary(self) -> PassTime:
        """Return no time: the steps from which the profile was fitted have their boundaries in them."""
        return PassTime.of(STEP, 0.0, OVERHEAD)

    def of_first_use(self, tokens: float) -> PassTime:
        """Return the time in which the kernel first provides memory for the KV of so many tokens."""
        return self.passes.new_memory(tokens)
