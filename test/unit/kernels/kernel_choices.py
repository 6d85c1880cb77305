"""The choice of experts by the native kernel against float64, over numbers of experts, ties, infinities and NaN."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import sgl_batch_kernel as kernels
import torch
from kernel_checks import DTYPES, Check, same_on_any_threads

# tokens, experts, choices
SHAPES = (
    (0, 8, 2),
    (1, 2, 1),
    (1, 8, 8),
    (7, 17, 5),
    (33, 64, 8),
    (300, 60, 6),
    (5, 130, 130),
    (20, 256, 256),
    (2048, 64, 8),
    (2048, 256, 8),
)
MANY = 2048  # rows: torch takes long to sort their float64
# groups, groups that a row keeps; of the shapes whose experts they divide
GROUPS = ((1, 1), (2, 1), (4, 2), (8, 8), (8, 4), (16, 3))
SCORINGS = ("softmax", "sigmoid")
NAN, INFINITY = float("nan"), float("inf")
TOLERANCE = 5e-6  # of a weight: differences of logits as large as 25 are rounded to f32 before they are exponents
MARGIN = 1e-6  # ranks that lie closer to each other may be ordered differently when scores are rounded to f32


@dataclass(frozen=True, kw_only=True)
class Choice:
    logits: torch.Tensor
    top_k: int
    renormalize: bool
    scoring: str = "softmax"
    bias: torch.Tensor | None = None
    groups: int = 1
    kept: int = 1

    def made(self, logits: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.topk(
            self.logits if logits is None else logits,
            self.top_k,
            renormalize=self.renormalize,
            scoring=self.scoring,
            bias_E=self.bias,
            groups=self.groups,
            kept_groups=self.kept,
        )

    def in_float64(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weights, ids, and whether the row's choice is clear in f32 too. torch sorts NaN before all numbers."""
        logits = self.logits.double()
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        rank = logits if self.bias is None else scores + self.bias.double()
        clear = torch.ones(len(rank), dtype=torch.bool)
        if self.kept < self.groups:
            by_group = rank.unflatten(1, (self.groups, -1))
            best = by_group.sort(dim=-1, descending=True).values[..., : 1 if self.bias is None else 2].sum(-1)
            values, order = best.sort(dim=-1, descending=True, stable=True)
            clear &= self._are_apart(values, self.kept)
            out = torch.ones_like(best, dtype=torch.bool).scatter(1, order[:, : self.kept], False)
            rank = by_group.masked_fill(out[..., None], -INFINITY).flatten(1)
        values, order = rank.sort(dim=-1, descending=True, stable=True)
        clear &= self._are_apart(values, self.top_k)
        ids = order[:, : self.top_k]
        weights = scores.gather(1, ids)
        return weights / weights.sum(-1, keepdim=True) if self.renormalize else weights, ids, clear

    def _are_apart(self, values: torch.Tensor, count: int) -> torch.Tensor:
        """Return whether the first `count` differ from each other and from the rest; exact ties differ by id."""
        gaps = values[:, :count] - torch.nn.functional.pad(values[:, 1:], (0, 1), value=-INFINITY)[:, :count]
        return ((gaps == 0) | (gaps > MARGIN)).all(-1) if self.bias is not None else torch.ones(len(values)).bool()


def choice_cases() -> Iterator[Check]:
    for dtype, shape in itertools.product(DTYPES, SHAPES):
        for renormalize in (True, False) if shape[0] < MANY else (True,):
            yield from drawn_cases(dtype, shape, renormalize)
    yield from tied_cases()
    yield from strange_cases()


def drawn_cases(dtype: torch.dtype, shape: tuple[int, int, int], renormalize: bool) -> Iterator[Check]:
    tokens, experts, top_k = shape
    wide = (3 * torch.randn(tokens, experts + 3)).to(dtype)
    forms = itertools.product(SCORINGS, GROUPS, (False, True))
    for number, (scoring, (groups, kept), biased) in enumerate(forms):
        if tokens >= MANY and number // 2 % len(DTYPES) != DTYPES.index(dtype):
            continue  # by turns: each form meets one number type, with a bias and without
        if experts % groups or kept * experts // groups < top_k or (biased and kept < groups and experts == groups):
            continue
        choice = Choice(
            logits=wide[:, :experts],
            top_k=top_k,
            renormalize=renormalize,
            scoring=scoring,
            bias=torch.randn(experts) / 2 if biased else None,
            groups=groups,
            kept=kept,
        )
        name = f"topk {dtype} {shape} {scoring} {kept} of {groups} bias={biased} renormalize={renormalize}"
        yield from checks(name, choice)


def checks(name: str, choice: Choice) -> Iterator[Check]:
    weights, ids = choice.made()
    expected, expected_ids, clear = choice.in_float64()
    yield name + ": ids", torch.equal(ids[clear].long(), expected_ids[clear])
    yield name + ": unclear", len(clear) < 100 or bool(clear.float().mean() > 0.98)
    yield name + ": weights", close(weights[clear], expected[clear])
    yield name + ": within", bool(((ids >= 0) & (ids < choice.logits.shape[1])).all())
    yield name + ": distinct", bool((ids.sort(dim=-1).values.diff(dim=-1) > 0).all())
    # NaN is equal to itself here.
    bits = weights.view(torch.int32)
    yield name + ": threads", same_on_any_threads(lambda: choice.made()[0].view(torch.int32))
    yield name + ": threads, ids", same_on_any_threads(lambda: choice.made()[1])
    some = torch.randperm(len(ids))[: len(ids) // 2 + 1]
    alone = choice.made(choice.logits[some])
    yield name + ": a row's bits", torch.equal(alone[0].view(torch.int32), bits[some])
    yield name + ": a row's ids", torch.equal(alone[1], ids[some])


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found.double(), expected, rtol=TOLERANCE, atol=1e-37, equal_nan=True)


def tied_cases() -> Iterator[Check]:
    """Few different values, both zeros among them; sums of scores and bias are exact."""
    for experts, top_k in ((8, 3), (64, 8), (130, 20)):
        logits = torch.randint(-1, 2, (200, experts)).float()
        logits[::2][logits[::2] == 0] = -0.0
        logits[::3, ::5] = 0.0
        for dtype in DTYPES:
            choice = Choice(logits=logits.to(dtype), top_k=top_k, renormalize=True)
            yield from checks(f"topk ties {dtype} {experts} {top_k}", choice)
        bias = torch.randint(0, 3, (experts,)) / 4
        grouped = Choice(
            logits=torch.zeros(3, experts),
            top_k=top_k // 2,
            renormalize=False,
            scoring="sigmoid",
            bias=bias,
            groups=2,
            kept=1,
        )
        yield from checks(f"topk ties with a bias {experts} {top_k}", grouped)


def strange_cases() -> Iterator[Check]:
    """Check rows of infinities and NaN at all indices: the formula's choices, and only valid ids."""
    rows = [
        [-INFINITY, 1.0, -INFINITY, 2.0, 0.0, -INFINITY],
        [-INFINITY] * 6,
        [INFINITY, 1.0, 2.0, INFINITY, 0.0, 0.0],
        [NAN, 1.0, 2.0, 3.0, 4.0, 5.0],
        [5.0, 4.0, 3.0, NAN, 1.0, NAN],
        [NAN] * 6,
        [NAN, INFINITY, -INFINITY, 0.0, INFINITY, NAN],
        [3.0e38, -3.0e38, 0.0, 3.0e38, 1e-40, -1e-40],
        [100.0, 0.0, -100.0, 90.0, 88.0, -88.0],
    ]
    bits = torch.tensor([[0x7FC00001, -0x3FFFFF, 0x7F800001, 0, 0, 0]], dtype=torch.int32)  # NaN of other bits
    logits = torch.cat((torch.tensor(rows), bits.view(torch.float32)))
    for top_k, renormalize, scoring, dtype in itertools.product((1, 2, 6), (False, True), SCORINGS, DTYPES):
        choice = Choice(logits=logits.to(dtype), top_k=top_k, renormalize=renormalize, scoring=scoring)
        yield from checks(f"topk strange {dtype} {top_k} {scoring} renormalize={renormalize}", choice)
        biased = Choice(logits=logits, top_k=top_k, renormalize=renormalize, scoring=scoring, bias=torch.randn(6))
        _, ids = biased.made()
        known = [len(set(row) & set(range(6))) == top_k for row in ids.tolist()]
        yield f"topk strange with a bias {top_k} {scoring}", all(known)
