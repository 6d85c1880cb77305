"""Sampling depends on seed, position and the row alone, and follows the probabilities that the filters leave."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers import counter_sampler
from sgl_batch.layers.counter_sampler import (
    CounterSampler,
    counter_uniform,
    sample_top_k,
    sample_unfiltered,
    width_of,
)
from sgl_batch.layers.nucleus import draw, kept, sample_nucleus
from sgl_batch.sglang_adapter.sampling_rows import RowParameters

DRAWS = 100_000


def by_sort(probs: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw from a nucleus by the rule as it is said: sort, cut, draw."""
    values, tokens = probs.sort(dim=-1, descending=True, stable=True)
    return tokens.gather(1, draw(values, kept(values, top_ps, min_ps), uniforms)).squeeze(1)


def by_kernel(probs: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw from a nucleus by the native kernel; a top_k of all tokens makes it rank rows that no filter cuts, too."""
    kernels = native_kernels()
    assert kernels is not None
    top_ks = torch.full((len(probs),), probs.shape[-1], dtype=torch.int32)
    tokens: torch.Tensor = kernels.sample(probs, top_ks, top_ps.float(), min_ps.float(), uniforms)
    return tokens


NUCLEI = (by_sort, by_kernel, sample_nucleus)


@pytest.fixture(params=["kernels", "torch"])
def way(request, monkeypatch):
    """How the sampler draws: by the native kernel, or by groups of rows with torch's operators."""
    if request.param == "torch":
        monkeypatch.setattr(counter_sampler, "native_kernels", lambda: None)
    return request.param


def uniforms(seed: int, count: int = DRAWS, first: int = 0) -> torch.Tensor:
    return counter_uniform(torch.full((count,), seed), torch.arange(first, first + count))


def splitmix(seed: int, position: int) -> float:
    """The same number by Python's integers."""
    mask = 2**64 - 1
    x = seed
    for addend in (1, position + 1):
        x = (x + addend * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
    return (x >> 11) * 2.0**-53


def chi_square(observed: list[int], expected: list[float]) -> float:
    return sum((seen - due) ** 2 / due for seen, due in zip(observed, expected, strict=True))


# Uniform numbers.


@pytest.mark.parametrize("seed", [0, 1, 2**62, 2**63 - 1])
def test_numbers_lie_in_the_unit_interval_and_fill_it_evenly(seed):
    drawn = uniforms(seed)
    assert drawn.dtype == torch.float64
    assert 0 <= drawn.min() < 0.001
    assert 0.999 < drawn.max() < 1
    assert abs(drawn.mean() - 1 / 2) < 0.005
    assert abs(drawn.var() - 1 / 12) < 0.002
    bins = torch.histc(drawn, bins=100, min=0, max=1).tolist()
    assert chi_square(bins, [DRAWS / 100] * 100) < 160, "p < 1e-4 for 99 degrees of freedom"


def test_numbers_depend_on_the_seed_and_on_the_position():
    assert len(set(uniforms(7, 10_000).tolist())) == 10_000
    assert len(set(counter_uniform(torch.arange(10_000), torch.zeros(10_000)).tolist())) == 10_000


@pytest.mark.parametrize(("seeds_apart", "positions_apart"), [(1, 0), (0, 1), (1, -1), (2**32, 0)])
def test_neighbours_in_seed_or_position_are_uncorrelated(seeds_apart, positions_apart):
    here, there = uniforms(5), uniforms(5 + seeds_apart, first=positions_apart)
    assert abs(torch.corrcoef(torch.stack((here, there)))[0, 1]) < 0.02


@pytest.mark.parametrize("seed", [0, 42, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 1, 600, 2**31])
def test_numbers_never_change_between_versions(seed, position):
    assert counter_uniform(torch.tensor([seed]), torch.tensor([position])).item() == splitmix(seed, position)


# Samples by the rule, exactly: weights in 1/65536 and limits between them leave nothing to rounding.

SCALE = 1 << 16


def weights_of(chooser: random.Random, vocab_size: int) -> list[int]:
    """Distinct whole weights that add up to SCALE, in random order."""
    weights = chooser.sample(range(1, 600), vocab_size)
    share, rest = divmod(SCALE - sum(weights), vocab_size)
    weights = [weight + share for weight in weights]
    weights[weights.index(max(weights))] += rest
    return weights


def by_the_rule(weights: list[int], top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """Walk down the tokens in descending order, keep what the filters keep, and invert the distribution."""
    kept, before = [], 0
    for rank, token in enumerate(sorted(range(len(weights)), key=lambda t: -weights[t])):
        if rank < top_k and before <= top_p * SCALE and weights[token] >= min_p * max(weights):
            kept.append(token)
        before += weights[token]
    threshold, total = uniform * sum(weights[token] for token in kept), 0
    for token in kept:
        total += weights[token]
        if total > threshold:
            return token
    raise AssertionError("a uniform number is below 1")


@pytest.mark.parametrize("seed", range(6))
def test_a_sample_respects_top_k_top_p_and_min_p_exactly(seed):
    chooser = random.Random(seed)
    rows = []
    for _ in range(200):
        rows.append(
            (
                weights_of(chooser, 50),
                chooser.choice([2, 3, 5, 8, 25, 26, 49, 50, 1000, TOP_K_ALL]),
                chooser.choice([0.0, 1.0, (chooser.randrange(SCALE) + 0.5) / SCALE]),
                chooser.choice([0.0, 1.0, chooser.randrange(64) / 64]),
                chooser.choice([0.0, 1 - 2.0**-53, chooser.random()]),
            )
        )
    expected = [by_the_rule(*row) for row in rows]
    assert [by_top_k(*row) for row in rows] == expected
    all_weights, top_ks, *filters, numbers = zip(*rows, strict=True)
    given = torch.tensor(top_ks, dtype=torch.int32), *map(torch.tensor, filters)
    kernels = native_kernels()
    assert kernels is not None
    by_one_call = kernels.sample(torch.tensor(all_weights) / SCALE, *given, torch.tensor(numbers, dtype=torch.float64))
    cut = [row[1] < TOP_K_ALL or row[2] != 1.0 or row[3] > 0 for row in rows]
    assert [token for token, one in zip(by_one_call.tolist(), cut, strict=True) if one] == [
        token for token, one in zip(expected, cut, strict=True) if one
    ], "rows without filters are drawn in the order of tokens"
    nuclei = [row for row in rows if row[1] >= 1000]
    weights, _, *limits, drawn = zip(*nuclei, strict=True)
    given = torch.tensor(weights) / SCALE, *map(torch.tensor, limits), torch.tensor(drawn, dtype=torch.float64)
    for find in NUCLEI:
        tokens = find(*given)
        assert tokens.tolist() == [by_the_rule(*row) for row in nuclei], find.__name__


def by_top_k(weights: list[int], top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    probs, limits = torch.tensor([weights]) / SCALE, torch.tensor([[top_p], [min_p]])
    drawn = torch.tensor([uniform], dtype=torch.float64)
    return sample_top_k(probs, width_of(top_k, len(weights)), torch.tensor([top_k]), *limits, drawn).item()


@pytest.mark.parametrize("with_ties", [False, True])
@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
def test_a_cut_without_a_sort_draws_what_a_sort_of_the_vocabulary_draws(spread, with_ties):
    """Nuclei of a few tokens and of most; equal probabilities on both sides of a cut."""
    draws = torch.Generator().manual_seed(int(10 * spread))
    logits = spread * torch.randn(96, 5000, generator=draws)
    probs = torch.softmax(logits.bfloat16().float() if with_ties else logits, dim=-1)
    top_ps = torch.rand(96, generator=draws).index_fill(0, torch.arange(0, 96, 7), 1.0)
    min_ps = torch.where(torch.rand(96, generator=draws) < 0.5, 0.0, 0.2 * torch.rand(96, generator=draws))
    drawn = torch.rand(96, generator=draws, dtype=torch.float64)
    expected = by_sort(probs, top_ps, min_ps, drawn)
    for find in (by_kernel, sample_nucleus):
        assert torch.equal(find(probs, top_ps, min_ps, drawn), expected), find.__name__


def test_of_equal_probabilities_across_a_cut_the_first_tokens_stay():
    """More of them than a cut looks at: 3,000 equal ones, of which a nucleus takes half."""
    probs = torch.full((16, 3000), 1 / 4096)
    limits = torch.full((16,), 1500.5 / 4096), torch.zeros(16)
    drawn = torch.arange(16, dtype=torch.float64) / 16
    expected = [int(1501 * number) for number in drawn.tolist()]
    for find in NUCLEI:
        assert find(probs, *limits, drawn).tolist() == expected, find.__name__


def test_a_number_at_the_edge_between_two_tokens_draws_the_later_one():
    probs = torch.tensor([[0.25, 0.5, 0.125, 0.125]]).expand(5, -1)
    drawn = torch.tensor([0.0, 0.4999, 0.5, 0.75, 0.9999], dtype=torch.float64)
    ones = torch.ones(5)
    for find in NUCLEI:
        assert find(probs, ones, 0 * ones, drawn).tolist() == [1, 1, 0, 2, 3], find.__name__


def test_a_sample_without_filters_inverts_the_distribution_as_it_lies():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).expand(7, -1)
    drawn = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999, 1 - 2.0**-53], dtype=torch.float64)
    expected = [1, 1, 3, 3, 4, 4, 4]
    assert sample_unfiltered(probs, drawn).tolist() == expected
    kernels = native_kernels()
    assert kernels is not None
    top_ks, top_ps, min_ps = torch.full((7,), TOP_K_ALL, dtype=torch.int32), torch.ones(7), torch.zeros(7)
    assert kernels.sample(probs, top_ks, top_ps, min_ps, drawn).tolist() == expected


FILTERS = {
    "none": (TOP_K_ALL, 1.0, 0.0, 8),
    "top_k": (3, 1.0, 0.0, 3),
    "top_p": (TOP_K_ALL, 0.7, 0.0, 4),
    "min_p": (TOP_K_ALL, 1.0, 0.3, 5),
    "all": (5, 0.7, 0.5, 3),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", FILTERS)
def test_frequencies_follow_the_probabilities_that_the_filters_leave(name):
    top_k, top_p, min_p, num_kept = FILTERS[name]
    probs = torch.tensor([0.05, 0.30, 0.02, 0.18, 0.03, 0.20, 0.10, 0.12])
    count = 20_000
    tokens = sampled(
        probs.expand(count, -1),
        [Row(top_k=top_k, top_p=top_p, min_p=min_p, seed=3, position=position) for position in range(count)],
    )
    seen = torch.bincount(tokens, minlength=len(probs))
    kept = probs.sort(descending=True).indices[:num_kept].sort().values
    assert seen.nonzero().squeeze(1).tolist() == kept.tolist()
    expected = probs[kept] / probs[kept].sum() * count
    # The quantile 0.9999 for 7 degrees of freedom; fewer make it safer.
    assert chi_square(seen[kept].tolist(), expected.tolist()) < 29.9


# Whole batches.


class Row(SimpleNamespace):
    """The sampling parameters of one sequence; by default without filters."""

    def __init__(self, **fields):
        super().__init__(**{"top_k": TOP_K_ALL, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0, **fields})


def batch_of(rows: list[Row], temperatures: list[float] | None = None, *, masks: bool = False) -> SimpleNamespace:
    """What SGLang's forward reads of a batch, at temperature 1 if no other is given."""
    return SimpleNamespace(
        sampling_seed=torch.tensor([row.seed for row in rows]),
        temperatures=torch.tensor(temperatures or [1.0] * len(rows))[:, None],
        top_ks=torch.tensor([row.top_k for row in rows], dtype=torch.int32),
        top_ps=torch.tensor([row.top_p for row in rows]),
        min_ps=torch.tensor([row.min_p for row in rows]),
        rows=[RowParameters(row.top_k, row.top_p, row.min_p) for row in rows],
        groups=None,
        grammars=None,
        has_custom_logit_processor=False,
        is_all_greedy=False,
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=True,
        return_sampling_masks=[masks and place % 2 == 0 for place in range(len(rows))],
        sampling_mask_max_top_k=0,
    )


def sampled(probs: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """Return the tokens that the sampler draws, called as SGLang's forward calls it."""
    sampler = CounterSampler.__new__(CounterSampler)  # its constructor wants SGLang's process groups
    return sampler._sample_from_probs(probs, batch_of(rows), torch.tensor([row.position for row in rows]), False)


def mixed_rows(count: int) -> list[Row]:
    chooser = random.Random(count)
    return [
        Row(
            top_k=chooser.choice([1, 2, 7, 40, 300, 700, TOP_K_ALL, TOP_K_ALL]),
            top_p=chooser.choice([1.0, 1.0, 0.9, 0.3]),
            min_p=chooser.choice([0.0, 0.0, 0.1]),
            seed=chooser.randrange(2**63),
            position=chooser.randrange(1000),
        )
        for _ in range(count)
    ]


def mixed_probs(count: int, *, with_ties: bool) -> torch.Tensor:
    logits = 3 * torch.randn(count, 1000, generator=torch.Generator().manual_seed(count))
    return torch.softmax(logits.bfloat16().float() if with_ties else logits, dim=-1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("with_ties", [False, True])
def test_a_row_draws_the_same_token_alone_and_in_any_batch_at_any_place(with_ties):
    rows, probs = mixed_rows(60), mixed_probs(60, with_ties=with_ties)
    together = sampled(probs.clone(), rows)
    alone = [sampled(probs[i : i + 1].clone(), rows[i : i + 1]).item() for i in range(60)]
    assert alone == together.tolist()
    generator = torch.Generator().manual_seed(0)
    for size in (2, 9, 60):
        some = torch.randperm(60, generator=generator)[:size]
        assert torch.equal(sampled(probs[some], [rows[i] for i in some.tolist()]), together[some])


def test_the_kernel_draws_what_torch_draws(monkeypatch):
    rows, probs = mixed_rows(80), mixed_probs(80, with_ties=False)
    by_kernel = sampled(probs.clone(), rows)
    monkeypatch.setattr(counter_sampler, "native_kernels", lambda: None)
    assert torch.equal(sampled(probs.clone(), rows), by_kernel)


@pytest.mark.usefixtures("way")
def test_a_greedy_row_takes_the_most_probable_token_whatever_its_seed():
    probs = mixed_probs(8, with_ties=False)
    for seed in range(3):
        rows = [Row(top_k=1, top_p=0.5, min_p=0.5, seed=seed, position=seed) for _ in range(8)]
        assert torch.equal(sampled(probs, rows), probs.argmax(-1))


@pytest.mark.usefixtures("way")
def test_a_greedy_row_takes_the_first_of_equally_probable_tokens():
    probs = torch.full((2, 300), 1e-3)
    probs[0, [7, 8, 250]] = 0.2
    probs[1, [299, 130]] = 0.3
    assert sampled(probs, [Row(top_k=1), Row(top_k=1)]).tolist() == [7, 130]


@pytest.mark.usefixtures("way")
def test_other_seeds_and_other_positions_draw_other_tokens():
    probs = torch.full((1000, 1000), 1e-3)
    assert len(set(sampled(probs, [Row(seed=seed) for seed in range(1000)]).tolist())) > 500
    assert len(set(sampled(probs, [Row(position=position) for position in range(1000)]).tolist())) > 500


def test_a_batch_without_seeds_is_a_scheduler_error():
    sampler = CounterSampler.__new__(CounterSampler)
    with pytest.raises(AssertionError, match="gives every row a seed"):
        sampler._sample_from_probs(
            mixed_probs(1, with_ties=False), SimpleNamespace(sampling_seed=None), torch.zeros(1), False
        )


def whole_sampler() -> CounterSampler:
    sampler = CounterSampler.__new__(CounterSampler)
    torch.nn.Module.__init__(sampler)
    sampler.rl_on_policy_target, sampler.enable_deterministic = None, False
    sampler.use_log_softmax_logprob, sampler.use_ascend_backend = False, False
    sampler.output_logprob_processor = OutputLogprobProcessor()
    return sampler


def whole_forward(
    logits: torch.Tensor, info: SimpleNamespace, rows: list[Row], *, logprobs: bool, names: bool = True
) -> dict[str, object]:
    output = SimpleNamespace(next_token_logits=logits.clone())
    named = [[3, 99] if names and place % 3 == 0 else None for place in range(len(rows))]
    positions = torch.tensor([row.position for row in rows])
    counts = [place % 4 for place in range(len(rows))]
    tokens = whole_sampler().forward(output, info, logprobs, counts, named, positions)
    del output.next_token_logits  # nobody reads them again
    return {"tokens": tokens, **vars(output)}


@pytest.mark.parametrize("masks", [False, True], ids=["", "masks"])
@pytest.mark.parametrize("logprobs", [False, True], ids=["", "logprobs"])
@pytest.mark.parametrize("original", [False, True], ids=["", "original"])
def test_the_kernels_way_from_logits_gives_what_sglangs_gives(monkeypatch, logprobs, masks, original):
    monkeypatch.setattr(counter_sampler, "RETURN_ORIGINAL_LOGPROB", original)
    monkeypatch.setattr("sglang.srt.layers.sampler.SGLANG_RETURN_ORIGINAL_LOGPROB", original)
    rows = mixed_rows(60)
    logits = 3 * torch.randn(60, 1000, generator=torch.Generator().manual_seed(0))
    logits[::7, 500:] = -torch.inf  # as a grammar masks them
    temperatures = [(0.3, 1.0, 1.7)[place % 3] for place in range(60)]
    by_kernel = whole_forward(logits, batch_of(rows, temperatures, masks=masks), rows, logprobs=logprobs)
    monkeypatch.setattr(counter_sampler, "native_kernels", lambda: None)
    by_sglang = whole_forward(logits, batch_of(rows, temperatures, masks=masks), rows, logprobs=logprobs)
    assert by_kernel.keys() == by_sglang.keys()
    assert ("next_token_logprobs" in by_kernel) == logprobs
    assert ("next_token_sampling_mask_idx" in by_kernel) == masks
    for name, expected in by_sglang.items():
        torch.testing.assert_close(by_kernel[name], expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("names", [False, True], ids=["", "named"])
def test_log_probabilities_of_greedy_rows_are_sglangs(monkeypatch, names):
    rows = [Row(top_k=1) for _ in range(60)]
    logits = 3 * torch.randn(60, 1000, generator=torch.Generator().manual_seed(2))
    logits[::7, 500:] = -torch.inf
    info = batch_of(rows, [1.0] * 60)
    info.is_all_greedy = True
    by_kernel = whole_forward(logits, info, rows, logprobs=True, names=names)
    monkeypatch.setattr(counter_sampler, "native_kernels", lambda: None)
    by_sglang = whole_forward(logits, info, rows, logprobs=True, names=names)
    assert by_kernel.keys() == by_sglang.keys()
    assert ("next_token_token_ids_logprobs_val" in by_kernel) == names
    for name, expected in by_sglang.items():
        torch.testing.assert_close(by_kernel[name], expected, rtol=2e-5, atol=1e-6)


def test_a_rows_log_probabilities_do_not_depend_on_what_its_neighbours_ask_for():
    rows = mixed_rows(60)
    logits = 3 * torch.randn(60, 1000, generator=torch.Generator().manual_seed(3))
    info = batch_of(rows, [0.8] * 60)
    with_named, without = (whole_forward(logits, info, rows, logprobs=True, names=names) for names in (True, False))
    for name in ("next_token_logprobs", "next_token_top_logprobs_val", "next_token_top_logprobs_idx"):
        torch.testing.assert_close(with_named[name], without[name], rtol=0, atol=0)


def test_log_probabilities_that_a_neighbour_asks_for_leave_a_rows_token_alone():
    rows = mixed_rows(60)
    logits = 3 * torch.randn(60, 1000, generator=torch.Generator().manual_seed(1))
    info = batch_of(rows, [0.8] * 60)
    without, asked = (whole_forward(logits, info, rows, logprobs=logprobs) for logprobs in (False, True))
    assert torch.equal(asked["tokens"], without["tokens"])


def test_a_row_that_names_tokens_for_log_probabilities_has_neighbours_that_name_none(monkeypatch):
    sampler, asked = CounterSampler.__new__(CounterSampler), []
    monkeypatch.setattr(CounterSampler.__base__, "forward", lambda _, *given: asked.append(given[4]))
    # Not on a CPU, which has a way of its own.
    output = SimpleNamespace(next_token_logits=torch.empty(2, 10, device="meta"))
    for named in ([[7, 9], None], [None, None]):
        sampler.forward(output, None, True, [0, 0], named, torch.zeros(2))
    assert asked == [[[7, 9], []], [None, None]], "SGLang asks each row of a batch where one is named, else none"
