"""Owns random jobs for a group of virtual ranks."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from sequence_builders import plan
from virtual_sequences import Request

from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.core.units import FUSED, SPLIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job, the ranks that run it, and the share of moves that fail."""

    seed: int
    num_ranks: int
    plan: Plan
    pages: int
    request_slots: int
    requests: list[Request]
    failing: float

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `VirtualRanks` that the job settles."""
        names = ("requests", "plan", "num_ranks", "pages", "request_slots", "takes")
        return {name: getattr(self, name) for name in names}

    def takes(self, name: str, step: int) -> bool:
        """Return whether a move of this sequence at this step succeeds; the same for every call."""
        return random.Random(f"{self.seed} {name} {step}").random() >= self.failing


def _plan(rng: random.Random) -> Plan:
    b_moe, b_moe_prefill, page_size = rng.randint(1, 12), rng.randint(1, 150), rng.choice((1, 8, 16))
    yield_option = SPLIT if rng.random() < 0.6 else FUSED
    mixes = yield_option == SPLIT and page_size <= b_moe_prefill and rng.random() < 0.5
    made = plan(
        b_moe_prefill=b_moe_prefill,
        b_moe=b_moe,
        boundary_tokens=rng.randint(1, 12),
        refill_watermark=rng.choice((0.0, 0.5, 0.75, 1.0)),
        ready_target=b_moe + rng.randint(0, 12),
        page_size=page_size,
        mix_prefill=rng.randint(page_size, b_moe_prefill) if mixes else 0,
    )
    return dataclasses.replace(
        made,
        prefill=PhasePlan(b_attn=rng.randint(1, b_moe_prefill), b_moe=b_moe_prefill, yield_option=yield_option),
        decode=PhasePlan(b_attn=rng.randint(1, b_moe), b_moe=b_moe, yield_option=yield_option),
    )


def tight(seed: int) -> Scenario:
    """Return a job with little memory, several choices, aborts, sequences that cannot move, and moves that fail."""
    rng = random.Random(seed)
    num_ranks, made = rng.choice((2, 3, 4)), _plan(rng)
    to_first = rng.choice((0.0, 0.5, 1.0))
    requests, at = [], 0
    for _ in range(rng.randint(5, 60)):
        at += rng.choice((0, 0, 0, 1, 2, 10))
        most = rng.randint(1, 40)
        requests.append(
            Request(
                at=at,
                rank=0 if rng.random() < to_first else rng.randrange(num_ranks),
                prompt=rng.choice((rng.randint(1, 40), rng.randint(1, 200))),
                max_new=most,
                output=rng.randint(1, most),
                choices=rng.choice((1, 1, 1, 1, 2, 5)),
                rooted=rng.random() < 0.1,
                abort_at=at + rng.randint(0, 40) if rng.random() < 0.1 else None,
            )
        )
    return Scenario(
        seed=seed,
        num_ranks=num_ranks,
        plan=made,
        pages=rng.randint(80, 1500) // made.page_size,
        request_slots=made.ready_target + rng.randint(0, 8),
        requests=requests,
        failing=rng.choice((0.0, 0.3, 0.3, 1.0)),
    )


def outgrowing(seed: int) -> Scenario:
    """Return a tight job whose sequences may outgrow what they have reserved: outputs are long, and pages few."""
    scenario, rng = tight(seed), random.Random(seed)
    made = plan(
        b_moe_prefill=rng.randint(40, 200),
        b_moe=rng.randint(2, 10),
        boundary_tokens=rng.randint(1, 12),
        ready_target=12,
        mix_prefill=rng.choice((0, 0, 16)),
    )
    requests = []
    for request in scenario.requests[:16]:
        most = rng.randint(2, 150)
        output = most if rng.random() < 0.3 else rng.randint(1, most)
        prompt = min(request.prompt, 60)
        requests.append(dataclasses.replace(request, prompt=prompt, max_new=most, output=output))
    return dataclasses.replace(
        scenario, plan=made, pages=rng.randint(28, 60), request_slots=12 + rng.randint(0, 8), requests=requests
    )


def roomy(seed: int) -> Scenario:
    """Return a job with room for all, whose sequences can all move; one rank gets most of them."""
    rng = random.Random(seed)
    num_ranks, made = rng.choice((2, 3, 4)), _plan(rng)
    requests, at = [], 0
    for _ in range(rng.randint(5, 60)):
        at += rng.choice((0, 0, 0, 1, 2, 10))
        rank = 0 if rng.random() < 0.7 else rng.randrange(num_ranks)
        requests.append(Request(at=at, rank=rank, prompt=rng.randint(1, 60), max_new=60, output=rng.randint(1, 60)))
    return Scenario(
        seed=seed, num_ranks=num_ranks, plan=made, pages=10_000, request_slots=200, requests=requests, failing=0.0
    )
