"""Owns what cases of weights whose groups share scales have in common: products have bfloat16's bits in every form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sgl_batch_kernel as kernels
import torch
from kernel_checks import Check
from kernel_coded import bits
from kernel_products import draw_routing

EXPERTS, TOP_K = 4, 2
# Of which each expert has half: so many that a panel meets one tile, several, several blocks, and some experts none.
TOKENS = (1, 2, 7, 24, 25, 50, 72, 160, 640)


@dataclass(frozen=True)
class Form:
    """A form of groups that share scales.

    `room`: a tensor for matrices of a shape; `unpack` takes the inputs of a row, too.
    """

    room: Callable[[tuple[int, ...]], torch.Tensor]
    pack: Callable[[torch.Tensor, torch.Tensor], bool]
    unpack: Callable[[torch.Tensor, int], torch.Tensor]


def matrices(weight: torch.Tensor, halves: int) -> torch.Tensor:
    batch, n, k = weight.shape
    return weight.view(batch * halves, n // halves, k)


class GroupedWeight:
    """Packed matrices of bfloat16, and the same ones in a form."""

    def __init__(self, form: Form, weight: torch.Tensor, *, halves: int = 1) -> None:
        self.plain, self.packed = weight, weight.clone()
        kernels.pack_(matrices(self.packed, halves))
        self.small = form.room(tuple(weight.shape))
        self.small.view(torch.uint8).fill_(255)
        self.fits = form.pack(matrices(weight, halves), matrices(self.small, halves))
        self._form, self._halves = form, halves

    def loses_nothing(self, *, signs_of_zeros: bool) -> bool:
        back = self._form.unpack(matrices(self.small, self._halves), self.plain.shape[2]).view_as(self.plain)
        expected = self.plain if signs_of_zeros else self.plain + 0.0
        return self.fits and torch.equal(bits(back), bits(expected))


def expert_cases(
    name: str, form: Form, sizes: tuple[int, int], draw: Callable[..., torch.Tensor], *, signs_of_zeros: bool
) -> Iterator[Check]:
    """Check experts of `sizes`, hidden and intermediate, whose weights are drawn in a form."""
    hidden, inter = sizes
    w13 = GroupedWeight(form, draw(EXPERTS, 2 * inter, hidden), halves=2)
    w2 = GroupedWeight(form, draw(EXPERTS, hidden, inter))
    yield name + ": nothing is lost", all(one.loses_nothing(signs_of_zeros=signs_of_zeros) for one in (w13, w2))
    biases = {"w13_bias": torch.randn(EXPERTS, 2 * inter), "w2_bias": torch.randn(EXPERTS, hidden)}
    clamped = {**biases, "alpha": 1.7, "limit": 7.0}
    for count in TOKENS:
        x, weights = torch.randn(count, hidden).bfloat16(), torch.rand(count, TOP_K)
        for routing in ("random", "some choices are absent"):
            choice = weights, draw_routing(routing, count, EXPERTS, TOP_K)
            more = clamped if count % 2 else {}
            exact = kernels.experts(x, w13.packed, w2.packed, *choice, f32_output=True, **more)
            found = kernels.experts(x, w13.small, w2.small, *choice, f32_output=True, **more)
            yield f"{name} {count} tokens, {routing}", all(map(torch.equal, found, exact))
        for dtype in (torch.bfloat16, torch.float32):
            rows, between = torch.randn(count, hidden, dtype=dtype), torch.randn(count, inter, dtype=dtype)
            yield f"{name} {count} rows of {dtype}, gated", _gated_alike(rows, w13)
            yield f"{name} {count} rows of {dtype}, linear", _linear_alike(between, w2)


def _gated_alike(rows: torch.Tensor, w13: GroupedWeight) -> bool:
    """Return whether the first expert's gate and up have the same bits in both forms: whole, and some channels."""
    inter = w13.plain.shape[1] // 2
    return all(
        torch.equal(kernels.gated(rows, w13.small[0], *some), kernels.gated(rows, w13.packed[0], *some))
        for some in ((0, inter), (inter // 2 // 32 * 32, inter))
    )


def _linear_alike(rows: torch.Tensor, weight: GroupedWeight) -> bool:
    """Return whether products with the first matrix have the same bits: with a bias, and with its last panel alone."""
    bias = torch.randn(weight.plain.shape[1])
    whole = [kernels.linear(rows, one[0], bias) for one in (weight.small, weight.packed)]
    last = kernels.linear(rows, weight.small[0, -32:])
    return torch.equal(*whole) and torch.equal(last, kernels.linear(rows, weight.packed[0, -32:]))
