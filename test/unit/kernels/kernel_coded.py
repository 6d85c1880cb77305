"""Experts with coded weights: codes lose nothing, and products have the bits of those with weights as they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import sgl_batch_kernel as kernels
import torch
from kernel_checks import Check, refusals
from kernel_products import draw_routing

EXPERTS, TOP_K = 4, 2
# Hidden and intermediate: with whole panels alone, with narrow ones, and with inputs that have no codes.
SIZES = ((256, 64), (100, 52), (36, 34), (34, 64))
# Of which each expert has half: so many that a panel meets one tile, several, several blocks, and some experts none.
TOKENS = (1, 2, 7, 24, 25, 50, 72, 160, 640)


def ordinary(weight: torch.Tensor) -> torch.Tensor:
    return weight


def awkward(weight: torch.Tensor) -> torch.Tensor:
    """Zeros of both signs, numbers too small to be normal, the largest, and some that are not finite."""
    few = torch.tensor([0.0, -0.0, 1e-40, -1e-39, 3e38, float("inf"), float("-inf"), float("nan")])
    places = weight.view(-1)[:: weight.numel() // 200]
    places.copy_(few.repeat(len(places))[: len(places)])
    return weight


def of_all_sizes(weight: torch.Tensor) -> torch.Tensor:
    """So many exponents that no panel of the first expert can be coded."""
    weight[0] *= torch.exp2(torch.randint(-100, 100, weight[0].shape))
    return weight


def zeros(weight: torch.Tensor) -> torch.Tensor:
    weight[1] = 0
    return weight


DRAWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (ordinary, awkward, of_all_sizes, zeros)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether numbers are the same, where those that are none, NaN, may be of any bits."""
    numbers = [bits(one.nan_to_num(0.0, float("inf"), float("-inf"))) for one in (found, expected)]
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(*numbers)


class CodedWeight:
    """Packed matrices, and the same ones coded with their marks."""

    def __init__(self, weight: torch.Tensor, *, halves: int = 1) -> None:
        batch, n, k = weight.shape
        self.packed, self.coded = weight.bfloat16(), weight.bfloat16().clone()
        kernels.pack_(self._matrices(self.packed, halves))
        self.marks = kernels.pack_coded_(self._matrices(self.coded, halves))
        self._halves, self.shape = halves, (batch * halves, n // halves, k)

    @staticmethod
    def _matrices(weight: torch.Tensor, halves: int) -> torch.Tensor:
        batch, n, k = weight.shape
        return weight.view(batch * halves, n // halves, k)

    def loses_nothing(self) -> bool:
        decoded = self.coded.clone()
        kernels.uncode_(self._matrices(decoded, self._halves), self.marks)
        return torch.equal(bits(decoded), bits(self.packed))

    def has_marks(self, *, first_is_plain: bool) -> bool:
        """Return whether whole panels are coded, but those of the first expert where it must not be, and no others."""
        expected = torch.zeros_like(self.marks, dtype=torch.bool)
        if self.shape[2] % 4 == 0:
            expected[self._halves if first_is_plain else 0 :, : self.shape[1] // 32] = True
        return torch.equal(self.marks > 0, expected)


def coded_cases() -> Iterator[Check]:
    for number, (sizes, draw) in enumerate(itertools.product(SIZES, DRAWS)):
        yield from coded_case(sizes, draw, TOKENS if number < len(DRAWS) else TOKENS[number % 3 :: 3])
    yield from refused_cases()


def coded_case(
    sizes: tuple[int, int], draw: Callable[[torch.Tensor], torch.Tensor], tokens: tuple[int, ...]
) -> Iterator[Check]:
    hidden, inter = sizes
    name = f"coded experts {hidden}x{inter} {draw.__name__}"
    w13 = CodedWeight(draw(torch.randn(EXPERTS, 2 * inter, hidden) / hidden**0.5), halves=2)
    w2 = CodedWeight(draw(torch.randn(EXPERTS, hidden, inter) / inter**0.5))
    yield name + ": codes", w13.loses_nothing() and w2.loses_nothing()
    first_is_plain = draw is of_all_sizes
    yield name + ": marks", w13.has_marks(first_is_plain=first_is_plain) and w2.has_marks(first_is_plain=first_is_plain)
    for count in tokens:
        x, weights = torch.randn(count, hidden).bfloat16(), torch.rand(count, TOP_K)
        for routing in ("random", "some choices are absent"):
            choice = weights, draw_routing(routing, count, EXPERTS, TOP_K)
            plain = kernels.experts(x, w13.packed, w2.packed, *choice, f32_output=True)[0]
            for marks in ((w13.marks, w2.marks), (None, w2.marks), (w13.marks, None)):
                given = (w13.packed if marks[0] is None else w13.coded, w2.packed if marks[1] is None else w2.coded)
                out = kernels.experts(x, *given, *choice, f32_output=True, w13_marks=marks[0], w2_marks=marks[1])[0]
                yield f"{name} {count} tokens, {routing}, {[one is not None for one in marks]}", same_bits(out, plain)


def refused_cases() -> Iterator[Check]:
    weight, x = torch.zeros(2, 64, 32, dtype=torch.bfloat16), torch.zeros(1, 32)
    choice = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    w2 = torch.zeros(2, 32, 32)
    refused: tuple[tuple[str, Callable[[], object]], ...] = (
        ("only bfloat16 has codes", lambda: kernels.pack_coded_(weight.float())),
        ("one for each of 2 panels of 2 matrices", lambda: kernels.uncode_(weight, torch.zeros(3, dtype=torch.uint8))),
        (
            "w13 is Float with marks of coded bfloat16",
            lambda: kernels.experts(x, weight.float(), w2, *choice, w13_marks=torch.zeros(4, 1, dtype=torch.uint8)),
        ),
    )
    yield from refusals("coded", refused)
