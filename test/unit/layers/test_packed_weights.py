"""Packed weights compute what plain ones compute, and lie in their plain order while they are written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from gloo_pairs import gloo_groups
from torch.distributed import ProcessGroup

from sgl_batch.distributed.shared_arena import shared_arena
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers import cpu_gemm
from sgl_batch.layers.moe.clamped_experts import ClampedExperts
from sgl_batch.layers.moe.cpu_experts import combined_experts
from sgl_batch.layers.packed_weights import PackedWeights

EXPERTS, HIDDEN, INTER, TOP_K = 4, 48, 34, 2


@pytest.fixture(params=["native", "torch"])
def packed(request):
    """Weights with the native kernels, and where these are not installed."""
    return PackedWeights(native_kernels() if request.param == "native" else None)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = 1e-5 if found.dtype == torch.float32 else 0.03
    return found.dtype == expected.dtype and torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_the_plain_product(packed, dtype, shape, has_bias):
    weight, bias = draw(16, HIDDEN, dtype=dtype), draw(16, dtype=dtype) if has_bias else None
    plain, x = weight.clone(), draw(*shape, HIDDEN, dtype=dtype)
    packed.add_linear(weight)
    assert close(packed.linear(x, weight, bias), cpu_gemm.linear(x, plain, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_equal_the_plain_ones(packed, dtype):
    w13, w2 = draw(EXPERTS, 2 * INTER, HIDDEN, dtype=dtype) / 7, draw(EXPERTS, HIDDEN, INTER, dtype=dtype) / 6
    plain = w13.clone(), w2.clone()
    x, weights = draw(20, HIDDEN, dtype=dtype), torch.rand(20, TOP_K)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(20)])
    packed.add_experts(w13, w2)
    out, rows = packed.experts(x, w13, w2, weights, ids)
    expected, expected_rows = combined_experts(x, *plain, weights, ids)
    assert close(out, expected)
    assert rows.tolist() == expected_rows.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_by_head_read_and_write_parts_of_wider_rows(packed, dtype):
    weight, wide = draw(3, 10, 8, dtype=dtype), draw(7, 3, 12, dtype=dtype)
    expected = torch.einsum("thk,hnk->thn", wide[..., 2:10].double(), weight.double())
    out = torch.full((7, 3, 13), -1.0, dtype=dtype)
    packed.add_by_head(weight)
    packed.by_head(wide[..., 2:10], weight, out_THN=out[..., :10])
    assert close(out[..., :10], expected.to(dtype))
    assert out[..., 10:].eq(-1).all()


def test_a_weight_is_plain_while_it_is_written_and_packed_again_afterwards(packed):
    weight, x = draw(16, HIDDEN), draw(3, HIDDEN)
    plain = weight.clone()
    packed.add_linear(weight)
    with packed.plain():
        assert torch.equal(weight, plain)
        weight.mul_(2)
    assert close(packed.linear(x, weight), cpu_gemm.linear(x, 2 * plain))


def test_a_weight_is_packed_again_although_writing_it_failed(packed):
    weight, x = draw(16, HIDDEN), draw(3, HIDDEN)
    plain = weight.clone()
    packed.add_linear(weight)
    with pytest.raises(RuntimeError, match="the file ended"), packed.plain():
        raise RuntimeError("the file ended")
    assert close(packed.linear(x, weight), cpu_gemm.linear(x, plain))


@pytest.mark.parametrize(
    "weight",
    [torch.ones(8, 5, dtype=torch.bfloat16), torch.ones(8, 6, dtype=torch.float64), torch.ones(6, 8).t()],
    ids=["odd bf16", "float64", "transposed"],
)
def test_weights_that_the_kernels_cannot_take_stay_plain(weight):
    packed = PackedWeights(native_kernels())
    assert not packed.add_linear(weight)
    assert len(packed) == 0
    x = torch.ones(2, weight.shape[1], dtype=weight.dtype)
    assert (packed.linear(x, weight) == weight.shape[1]).all()


@pytest.fixture
def rounding():
    return PackedWeights(native_kernels(), int8=True)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return the values of a weight after rounding each output's weights to 255 values."""
    scale = weight.float().abs().amax(-1, keepdim=True) / 127
    return ((weight.float() / scale).round() * scale).to(weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounded_weights_compute_the_rounded_product_in_less_memory(rounding, dtype):
    weight, x = draw(16, HIDDEN, dtype=dtype), draw(7, HIDDEN).to(torch.bfloat16).to(dtype)
    plain = weight.clone()
    assert rounding.add_linear(weight)
    assert weight.dtype == torch.int8
    expected = x.double() @ rounded(plain.float()).double().t()
    assert close(rounding.linear(x, weight), expected.to(dtype))


@pytest.mark.parametrize("single", [False, True])
def test_rounded_experts_compute_the_rounded_products(rounding, single):
    experts = 1 if single else EXPERTS
    w13, w2 = draw(experts, 2 * INTER, HIDDEN).bfloat16() / 7, draw(experts, HIDDEN, INTER).bfloat16() / 6
    plain = rounded(w13), rounded(w2)
    given = (w13[0], w2[0]) if single else (w13, w2)
    x, weights = draw(20, HIDDEN).bfloat16(), torch.rand(20, 1)
    ids = torch.arange(20)[:, None] % experts
    assert rounding.add_experts(*given)
    w13, w2 = (given[0][None], given[1][None]) if single else given
    out, _ = rounding.experts(x, w13, w2, weights, ids)
    assert close(out, combined_experts(x, *plain, weights, ids)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounded_weights_are_plain_while_they_are_written_and_round_to_the_same_again(rounding, dtype):
    weight, x = draw(16, HIDDEN, dtype=dtype), draw(3, HIDDEN, dtype=dtype)
    plain = weight.clone()
    rounding.add_linear(weight)
    before = rounding.linear(x, weight)
    with rounding.plain():
        assert torch.equal(weight, rounded(plain))
    assert torch.equal(rounding.linear(x, weight), before)
    with rounding.plain():
        weight.copy_(plain * 2)
    assert torch.equal(rounding.linear(x, weight), before * 2)


@pytest.mark.parametrize("int8", [False, True])
def test_experts_whose_rows_alternate_are_plain_while_they_are_written(int8):
    packed = PackedWeights(native_kernels(), int8=int8)
    w13, w2 = draw(EXPERTS, 2 * INTER, HIDDEN) / 7, draw(EXPERTS, HIDDEN, INTER) / 6
    plain = (rounded(w13), rounded(w2)) if int8 else (w13.clone(), w2.clone())
    x, weights, ids = draw(20, HIDDEN), torch.rand(20, 1), torch.arange(20)[:, None] % EXPERTS
    clamped = ClampedExperts(w13_bias=draw(EXPERTS, 2 * INTER), w2_bias=draw(EXPERTS, HIDDEN), alpha=1.702, limit=1.0)
    assert packed.add_experts(w13, w2, clamped=True)
    for factor in (1, 2):
        out, _ = packed.experts(x, w13, w2, weights, ids, clamped=clamped)
        expected, _ = combined_experts(x, factor * plain[0], plain[1], weights, ids, clamped=clamped)
        assert torch.allclose(out, expected, rtol=1e-2, atol=1e-2) if int8 else close(out, expected)
        with packed.plain():
            assert close(w13, factor * plain[0])
            w13.mul_(2)


def test_coded_experts_have_the_bits_of_plain_ones_and_are_plain_while_they_are_written():
    coded, plain = PackedWeights(native_kernels(), coded=True), PackedWeights(native_kernels())
    given = draw(EXPERTS, 64, HIDDEN, dtype=torch.bfloat16) / 7, draw(EXPERTS, HIDDEN, 32, dtype=torch.bfloat16) / 6
    own, others = [[one.clone() for one in given] for _ in range(2)]
    x, weights, ids = draw(20, HIDDEN, dtype=torch.bfloat16), torch.rand(20, 1), torch.arange(20)[:, None] % EXPERTS
    assert coded.add_experts(*own)
    assert plain.add_experts(*others)
    assert coded.has_codes
    assert not plain.has_codes
    assert plain.is_plain_number(others[0])
    assert not coded.is_plain_number(own[0])
    for factor in (1, 2):
        found, expected = coded.experts(x, *own, weights, ids)[0], plain.experts(x, *others, weights, ids)[0]
        assert torch.equal(found, expected)
        assert not torch.equal(own[0], others[0]), "what is read is not what is written"
        with coded.plain(), plain.plain():
            assert torch.equal(own[0], factor * given[0])
            own[0].mul_(2)
            others[0].mul_(2)


def test_float32_experts_and_single_ones_have_no_codes():
    packed = PackedWeights(native_kernels(), coded=True)
    packed.add_experts(draw(EXPERTS, 64, HIDDEN), draw(EXPERTS, HIDDEN, 32))
    packed.add_experts(draw(64, HIDDEN, dtype=torch.bfloat16), draw(HIDDEN, 32, dtype=torch.bfloat16))
    packed.add_linear(draw(64, HIDDEN, dtype=torch.bfloat16))
    assert len(packed) == 5
    assert not packed.has_codes


@pytest.fixture
def rounding_rows():
    return PackedWeights(native_kernels(), int8=True, int8_rows=True)


@pytest.mark.parametrize(
    ("dtype", "inputs"),
    [(torch.float32, HIDDEN), (torch.float32, 33), (torch.bfloat16, HIDDEN), (torch.bfloat16, 30)],
    ids=str,
)
def test_int8_rows_give_the_product_of_rounded_rows_and_weights(rounding_rows, dtype, inputs):
    weight, x, bias = draw(16, inputs, dtype=dtype), draw(3, 5, inputs, dtype=dtype), draw(16, dtype=dtype)
    plain = weight.clone()
    assert rounding_rows.add_linear(weight)
    assert weight.dtype == torch.int8
    expected = rounded(x.float()).double() @ rounded(plain.float()).double().t() + bias
    assert close(rounding_rows.linear(x, weight, bias), expected.to(dtype))


@pytest.mark.parametrize("clamped", [False, True])
def test_int8_rows_meet_experts_and_rows_of_one_are_those_of_an_mlp(rounding_rows, clamped):
    w13, w2 = draw(EXPERTS, 2 * INTER, HIDDEN) / 7, draw(EXPERTS, HIDDEN, INTER) / 6
    plain, x = (rounded(w13), rounded(w2)), draw(20, HIDDEN)
    weights, ids = torch.rand(20, 1), torch.arange(20)[:, None] % EXPERTS
    biases = {"w13_bias": draw(EXPERTS, 2 * INTER), "w2_bias": draw(EXPERTS, HIDDEN)}
    activation = ClampedExperts(**biases, alpha=1.702, limit=1.0) if clamped else None
    assert rounding_rows.add_experts(w13, w2, clamped=clamped)
    out, rows = rounding_rows.experts(x, w13, w2, weights, ids, clamped=activation)
    expected, expected_rows = combined_experts(rounded(x), *plain, weights, ids, clamped=activation)
    assert rows.tolist() == expected_rows.tolist()
    error = (out - expected).norm() / expected.norm()
    assert error < 0.02, "what lies between the products is rounded too"
    if clamped:
        return
    own13, own2 = draw(2 * INTER, HIDDEN), draw(HIDDEN, INTER)
    rounding_rows.add_experts(own13, own2)
    one = torch.ones(20, 1), torch.zeros(20, 1, dtype=torch.int32)
    whole, _ = rounding_rows.experts(x, own13[None], own2[None], *one)
    assert torch.equal(rounding_rows.mlp(x, own13, own2), whole)


@pytest.mark.parametrize("clamped", [False, True])
def test_weights_that_meet_int8_rows_are_plain_while_they_are_written(rounding_rows, clamped):
    linear, w13, w2 = draw(40, HIDDEN), draw(EXPERTS, 2 * INTER, HIDDEN), draw(EXPERTS, HIDDEN, INTER)
    plain, x = [rounded(one) for one in (linear, w13, w2)], draw(3, HIDDEN)
    rounding_rows.add_linear(linear)
    rounding_rows.add_experts(w13, w2, clamped=clamped)
    before = rounding_rows.linear(x, linear)
    with rounding_rows.plain():
        assert all(torch.equal(one, expected) for one, expected in zip((linear, w13, w2), plain, strict=True))
    assert torch.equal(rounding_rows.linear(x, linear), before)
    with rounding_rows.plain():
        linear.mul_(2)
    assert torch.equal(rounding_rows.linear(x, linear), 2 * before)


def test_an_exact_weight_meets_rows_as_they_are(rounding_rows):
    weight, x = draw(16, HIDDEN), draw(3, HIDDEN)
    plain = weight.clone()
    rounding_rows.add_linear(weight, exact=True)
    assert close(rounding_rows.linear(x, weight), x @ plain.t())


def test_a_weight_of_zeros_and_one_that_must_stay_exact(rounding):
    zeros, exact, x = torch.zeros(16, HIDDEN), draw(16, HIDDEN), draw(3, HIDDEN)
    plain = exact.clone()
    rounding.add_linear(zeros)
    rounding.add_linear(exact, exact=True)
    assert rounding.linear(x, zeros).eq(0).all()
    assert exact.dtype == torch.float32
    assert close(rounding.linear(x, exact), x @ plain.t())


def test_without_kernels_nothing_is_packed():
    packed = PackedWeights(None)
    assert not packed.add_linear(torch.ones(8, 8))
    assert not packed.add_experts(torch.ones(2, 8, 4), torch.ones(2, 4, 4))
    assert len(packed) == 0


@pytest.mark.parametrize("kernels", [native_kernels(), None], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("outputs", [6, 64, 70])
def test_rows_of_a_packed_weight_are_those_of_the_plain_one(kernels, dtype, outputs):
    weight = torch.randn(outputs, 10).to(dtype)
    plain, packed = weight.clone(), PackedWeights(kernels)
    assert packed.add_linear(weight) == (kernels is not None)
    for ids in (torch.arange(outputs), torch.tensor([[outputs - 1, 0], [3, 3]]), torch.empty(0, dtype=torch.int64)):
        assert torch.equal(packed.rows(ids, weight), plain[ids])


def on_both(ranks: Sequence[Rank], do: Callable[[Rank], object]) -> None:
    """Call `do` for two ranks at once: they wait for each other."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(do, ranks))


@dataclass
class Rank:
    """A rank that shares two weights with another rank: one that may be rounded, and an exact one."""

    group: ProcessGroup
    packed: PackedWeights
    dtype: torch.dtype
    shared: list[torch.Tensor] = field(default_factory=list)

    def pack(self) -> None:
        plain = [draw(64, HIDDEN, dtype=self.dtype), draw(80, HIDDEN, dtype=self.dtype)]
        arena = shared_arena(self.group, 1 << 20)
        assert arena is not None
        self.packed.share(arena)
        self.shared = [arena.empty(one.shape, one.dtype) for one in plain]
        for rank, (here, one) in enumerate(zip(self.shared, plain, strict=True)):
            if rank == self.group.rank():
                here.copy_(one)
        arena.barrier()
        for number, weight in enumerate(self.shared):
            self.packed.add_linear(weight, exact=number == 1)
        arena.seal()

    def products(self) -> list[torch.Tensor]:
        return [self.packed.linear(draw(5, HIDDEN, dtype=self.dtype), weight) for weight in self.shared]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rounding", [{}, {"int8": True}, {"int8": True, "int8_rows": True}], ids=str)
def test_ranks_pack_shared_weights_once_and_one_writes_to_its_own_copy_alone(dtype, rounding):
    def weights() -> PackedWeights:
        return PackedWeights(native_kernels(), **rounding)

    ranks = [Rank(group, weights(), dtype) for group in gloo_groups(2)]
    on_both(ranks, Rank.pack)
    alone = Rank(ranks[0].group, weights(), dtype, [draw(64, HIDDEN, dtype=dtype), draw(80, HIDDEN, dtype=dtype)])
    for number, weight in enumerate(alone.shared):
        alone.packed.add_linear(weight, exact=number == 1)

    def equal(one: Rank, other: Rank) -> bool:
        return all(map(torch.equal, one.products(), other.products()))

    assert equal(ranks[0], alone)
    assert equal(ranks[1], alone)
    for rank in (ranks[0], alone):
        with rank.packed.plain():
            rank.shared[1].mul_(2)
            rank.shared[0].neg_()
    assert equal(ranks[0], alone)
    assert not equal(ranks[1], alone)
    with ranks[1].packed.plain():
        pass
    with alone.packed.plain():
        alone.shared[1].div_(2)
        alone.shared[0].neg_()
    assert equal(ranks[1], alone)
