"""Every token dispatcher that this machine can run delivers the same rows and returns the same bits on any ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from dispatch_cases import CASES, Case
from dispatch_reference import expected_output, expected_rows, expert_term, in_order_sum, same_bits
from rank_processes import Implementation, ProcessCache, Ranks, implementations
from rank_work import (
    Exchanged,
    combine_with_fault,
    count_collectives,
    dispatch_mismatched,
    dispatch_twice,
    dispatch_with_fault,
    exchange,
    exchange_in_both_modes,
)

IMPLEMENTATIONS = implementations()
IN_PROCESSES = [each for each in IMPLEMENTATIONS if each.name in ("gloo", "nccl")]
# bfloat16 and rows of whole 16-byte units, which every implementation supports.
PLAIN = Case(name="plain", dtype=torch.bfloat16)


def supports(implementation: Implementation, case: Case) -> bool:
    """Return whether the implementation must exchange such rows."""
    if implementation.name == "deepep" and (case.dtype != torch.bfloat16 or case.hidden_size % 8):
        return False
    return case.num_experts % implementation.world_size == 0


EXCHANGES = [
    pytest.param(implementation, case, id=f"{implementation}-{case.name}")
    for implementation in IMPLEMENTATIONS
    for case in CASES
    if supports(implementation, case)
]


@cache
def same_on_powers_of_two(case: Case, world_size: int) -> torch.Tensor:
    """Return the outputs of all tokens. On a power of two of ranks they must have the bits of one rank."""
    return expected_output(case, 1 if world_size.bit_count() == 1 else world_size)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, process_cache: ProcessCache) -> Ranks:
    return process_cache.ranks(request.param)


def exchanged(processes: ProcessCache, implementation: Implementation, case: Case) -> list[Exchanged]:
    return processes.ranks(implementation).call(exchange, case)


@pytest.mark.parametrize(("implementation", "case"), EXCHANGES)
def test_outputs_have_the_bits_of_one_rank_and_each_rank_gets_its_rows_in_order(
    implementation: Implementation, case: Case, process_cache: ProcessCache
) -> None:
    results = exchanged(process_cache, implementation, case)
    world_size = implementation.world_size
    if implementation.name != "local":  # which passes on all tokens
        for rank, result in enumerate(results):
            x_RM, ids_RK, weights_RK = expected_rows(case, rank, world_size)
            assert same_bits(result.x_RM, x_RM), f"rank {rank} got other rows, or in another order"
            assert same_bits(result.ids_RK, ids_RK), f"rank {rank} got other choices"
            assert same_bits(result.weights_RK, weights_RK), f"rank {rank} got other weights"
    assert [len(result.out_TM) for result in results] == case.tokens_per_rank(world_size)
    out_NM = torch.cat([result.out_TM for result in results])
    expected_NM = same_on_powers_of_two(case, world_size)
    if results[0].exact:
        assert same_bits(out_NM, expected_NM)
    else:
        torch.testing.assert_close(out_NM, expected_NM, rtol=0.05, atol=0.05)


def test_local_passes_all_tokens_to_the_only_rank(process_cache: ProcessCache) -> None:
    local = IMPLEMENTATIONS[0]
    (result,) = exchanged(process_cache, local, PLAIN)
    for got, given in zip((result.x_RM, result.ids_RK, result.weights_RK), PLAIN.batch(), strict=True):
        assert same_bits(got, given)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_a_repeated_exchange_gives_the_same_bits(implementation: Implementation, process_cache: ProcessCache) -> None:
    large = replace(PLAIN, name="large", num_tokens=2000, top_k=8)
    rounds = [exchanged(process_cache, implementation, case) for case in (PLAIN, large, PLAIN, PLAIN)]
    for first, *others in zip(rounds[0], rounds[2], rounds[3], strict=True):
        for other in others:
            assert same_bits(first.x_RM, other.x_RM)
            assert same_bits(first.ids_RK, other.ids_RK)
            assert same_bits(first.weights_RK, other.weights_RK)
            assert same_bits(first.out_TM, other.out_TM)


@pytest.mark.parametrize(
    "case",
    [PLAIN, replace(PLAIN, num_tokens=0), replace(PLAIN, num_tokens=1500), replace(PLAIN, split="last only")],
    ids=["64 tokens", "no token", "1500 tokens", "tokens on the last rank only"],
)
@pytest.mark.parametrize("ranks", IN_PROCESSES, ids=str, indirect=True)
def test_a_dispatch_takes_two_collectives_and_a_combine_one_or_none_in_shared_memory(ranks: Ranks, case: Case) -> None:
    expected = (0, 0) if ranks.implementation.name == "shared" else (2, 1)
    assert set(ranks.call(count_collectives, case)) == {expected}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("x too narrow", "x_TM has shape [{T}, 23]; it must be [{T}, 24]"),
        ("x of integers", "x_TM is torch.int32; it must be torch.float32 or torch.bfloat16 or torch.float16"),
        ("x one token short", "x_TM has shape [{short}, 24]; it must be [{T}, 24]"),
        ("ids of one dimension", "topk_ids_TK has shape [{T}]; it must be [tokens, experts per token]"),
        ("no choices", "topk_ids_TK has shape [{T}, 0]; it must be [tokens, experts per token]"),
        ("ids of floats", "topk_ids_TK is torch.float32; it must be torch.int32 or torch.int64"),
        ("weights for fewer choices", "topk_weights_TK has shape [{T}, 3]; it must be [{T}, 4]"),
        ("weights in bfloat16", "topk_weights_TK is torch.bfloat16; it must be torch.float32"),
        ("weights elsewhere", "topk_weights_TK is on meta; it must be on"),
        ("expert too high", "experts are 0 to 23, and -1 is none"),
        ("expert below -1", "experts are 0 to 23, and -1 is none"),
    ],
)
@pytest.mark.parametrize("ranks", IMPLEMENTATIONS, ids=str, indirect=True)
def test_wrong_tokens_are_refused_before_any_collective(ranks: Ranks, fault: str, message: str) -> None:
    counts = PLAIN.tokens_per_rank(ranks.implementation.world_size)
    for (refusal, taken), count in zip(ranks.call(dispatch_with_fault, PLAIN, fault), counts, strict=True):
        assert message.format(T=count, short=count - 1) in refusal
        assert taken == 0
    ranks.call(exchange, PLAIN)  # the ranks are still in step


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("one row more", "partial_RM has shape"),
        ("too narrow", "partial_RM has shape"),
        ("in bfloat16", "partial_RM is torch.bfloat16; it must be torch.float32"),
        ("elsewhere", "partial_RM is on meta"),
        ("another exchange's", "not of this dispatcher's latest dispatch"),
    ],
)
@pytest.mark.parametrize("ranks", IMPLEMENTATIONS, ids=str, indirect=True)
def test_wrong_partials_are_refused_before_any_collective(ranks: Ranks, fault: str, message: str) -> None:
    for refusal, taken in ranks.call(combine_with_fault, PLAIN, fault):
        assert message in refusal
        assert taken == 0


@pytest.mark.parametrize("ranks", IMPLEMENTATIONS, ids=str, indirect=True)
def test_a_second_dispatch_before_the_combine_is_refused(ranks: Ranks) -> None:
    for refusal, taken in ranks.call(dispatch_twice, PLAIN):
        assert "twice without a combine" in refusal
        assert taken == 0


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAIN, dtype=torch.float32),
        replace(PLAIN, top_k=3),
        replace(PLAIN, hidden_size=32),
        replace(PLAIN, num_experts=48),
    ],
    ids=["type of x", "choices of a token", "hidden size", "experts"],
)
@pytest.mark.parametrize("ranks", [each for each in IN_PROCESSES if each.world_size > 1], ids=str, indirect=True)
def test_ranks_with_mismatched_rows_all_refuse_and_stay_in_step(ranks: Ranks, other: Case) -> None:
    assert all("all ranks must give the same" in refusal for refusal in ranks.call(dispatch_mismatched, PLAIN, other))
    ranks.call(exchange, PLAIN)


@pytest.mark.parametrize("ranks", IMPLEMENTATIONS, ids=str, indirect=True)
def test_a_dispatcher_serves_inside_and_outside_of_inference_mode(ranks: Ranks) -> None:
    cases = (PLAIN, replace(PLAIN, num_tokens=3), replace(PLAIN, num_tokens=500, seed=1))
    by_rank = ranks.call(exchange_in_both_modes, cases)
    for case, *outputs in zip(cases, *by_rank, strict=True):
        expected_NM = same_on_powers_of_two(case, ranks.implementation.world_size)
        torch.testing.assert_close(torch.cat(outputs), expected_NM, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("case", [case for case in CASES if case.num_experts % 4 == 0], ids=lambda case: case.name)
def test_on_a_power_of_two_of_ranks_the_sum_has_the_bits_of_one_rank(case: Case) -> None:
    for world_size in (2, 4):
        assert same_bits(expected_output(case, world_size), expected_output(case, 1))


def test_another_order_of_addition_gives_other_bits() -> None:
    case = Case(name="large", num_tokens=500, top_k=8)
    in_order_NM = in_order_sum(expert_term(*case.batch(), 0), 0, case.num_experts)
    torch.testing.assert_close(in_order_NM, expected_output(case, 1))
    assert not same_bits(in_order_NM, expected_output(case, 1))
    assert not same_bits(expected_output(case, 3), expected_output(case, 1))
