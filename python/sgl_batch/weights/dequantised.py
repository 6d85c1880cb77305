"""Owns taking the quantised matrices of a checkpoint back to floats, as their tensors are read."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sgl_batch.checkpoint.files import StoredTensor, few, read_header
from sgl_batch.checkpoint.quantised import (
    MOST_FOUR_BITS,
    MXFP4_BLOCK,
    WORD_BITS,
    Kind,
    QuantisedMatrix,
    QuantisedTensors,
    find_quantised,
)
from sgl_batch.core.quantised_form import QuantisedForm
from sgl_batch.errors import ConfigError
from sgl_batch.kernel_loader import native_kernels
from sgl_batch.memory.huge_buffer import huge_buffer
from sgl_batch.weights.load_share import LoadShare

Parts = Mapping[str, Tensor]
NamedTensors = Iterable[tuple[str, Tensor]]

# Numbers that are computed at a time, so that what is computed in float32 stays in a cache.
_AT_A_TIME = 1 << 18
# The 16 numbers of mxfp4 by code: a sign, two bits of exponent, one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS, _E8M0_NAN = 127, 255
# Dummy weights are no larger than SGLang's.
_DUMMY_POWER = _E8M0_BIAS - 12
_DUMMY_LARGEST = (2.0**-8, 1.25 * 2.0**-8)
_DUMMY_FP8_SCALES = (2.0**-17, 1.25 * 2.0**-17)
# Of e4m3, without its sign; and the inputs that share a scale where scales are not of blocks.
_E4M3_NAN, _DUMMY_FP8_GROUP = 0x7F, 128
_BYTE_BITS = 8
# Of the integers that stay in their words until they are floats.
_WORD_INTEGER_BITS = 4
# AWQ's words hold the integers of eight neighbouring outputs in this order.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class Dequantised:
    """Takes the quantised matrices of checkpoints of one form to floats of `dtype`.

    Each number is the product of its integer or small float and its scale, less a zero point where there is one,
    computed in float32 and rounded once. Powers of two as scales (mxfp4) and `dtype` bfloat16 give exact numbers.
    Matrices that another rank `loads` are left out, and of all experts' in one tensor, others than this rank's hold
    anything: of these no number is read.
    """

    def __init__(self, form: QuantisedForm, dtype: torch.dtype, loads: LoadShare | None = None) -> None:
        self._form, self._dtype, self._loads = form, dtype, loads or LoadShare()
        self._scratch = _Scratch()

    def __call__(self, files: Sequence[str], weights: NamedTensors) -> NamedTensors:
        """Yield `weights`, the tensors of safetensors `files`, each matrix as floats under its plain name.

        Raises ConfigError for a matrix whose tensors are not all there, or do not belong together.
        """
        if not files:
            raise ConfigError(
                f"the model's weights are quantised ({self._form.method}) and not in safetensors files, from which "
                "alone a CPU reads them: fetch the model's safetensors"
            )
        stored: dict[str, StoredTensor] = {}
        for file in files:
            stored |= read_header(Path(file))
        return self._yield(find_quantised(stored, self._form), weights)

    def _yield(self, quantised: QuantisedTensors, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        matrix_of, waiting = quantised.matrix_of(), dict[str, dict[str, Tensor]]()
        for name, weight in weights:
            if name in quantised.unused:
                continue
            if name not in matrix_of:
                yield name, weight
                continue
            plain, end = matrix_of[name]
            matrix = quantised.matrices[plain]
            if not self._loads.has(plain, matrix.shape):
                continue
            parts = waiting.setdefault(plain, {})
            parts[end] = weight
            if len(parts) == len(matrix.parts):
                del waiting[plain]
                yield plain, self._floats(matrix, parts)
        if waiting:
            raise ConfigError(
                f"tensors of {len(waiting)} quantised matrices were not read: {few(waiting)}; fetch the checkpoint anew"
            )

    def _floats(self, matrix: QuantisedMatrix, parts: Parts) -> Tensor:
        scales = next(part for end, part in parts.items() if "scale" in end)
        if not _are_finite(scales):
            raise ConfigError(
                f"{matrix.name} has scales that are infinite or no numbers: every answer would be wrong; quantise the "
                "model again, or fetch the checkpoint anew"
            )
        if matrix.kind is Kind.MXFP4:
            experts, inputs, outputs = matrix.shape
            out = self._scratch.tensor((experts, outputs, inputs), self._dtype)
            own = self._loads.experts_of(experts)
            mxfp4_floats(parts["_blocks"][own], parts["_scales"][own], out[own])
            return out.transpose(1, 2)
        out = self._scratch.tensor(matrix.shape, self._dtype)
        if matrix.kind is Kind.SCALED:
            if _widen_scaled(parts, self._form.block, out):
                return out
            of_rows = _scaled(parts, self._form.block)
        else:
            integers = self._integers(matrix, parts)
            if integers.widen(out):
                return out
            of_rows = integers.of_rows(matrix.shape[1])
        rows = max(1, _AT_A_TIME // matrix.shape[1])
        for first in range(0, matrix.shape[0], rows):
            last = min(first + rows, matrix.shape[0])
            out[first:last] = of_rows(first, last)
        return out

    def _integers(self, matrix: QuantisedMatrix, parts: Parts) -> _Integers:
        if matrix.kind is Kind.PACKED:
            return _packed(parts, matrix.bits, matrix.shape)
        return (_gptq if matrix.kind is Kind.GPTQ else _awq)(parts, matrix.bits, self._form.zero_lack)


def draw_numbers(form: QuantisedForm, out: Tensor) -> None:
    """Fill matrices [any, outputs, inputs] with random numbers that the form has exactly.

    Only numbers that stay in 4 or 8 bits in memory matter; of other forms `out` stays as it is.
    """
    if out.dim() != 3:
        return
    inputs = out.shape[2]
    if form.method == Kind.MXFP4 and inputs % MXFP4_BLOCK == 0:
        shape = *out.shape[:2], inputs // MXFP4_BLOCK
        blocks = torch.randint(0, 256, (*shape, MXFP4_BLOCK // 2), dtype=torch.uint8)
        mxfp4_floats(blocks, torch.full(shape, _DUMMY_POWER, dtype=torch.uint8), out)
    elif form.integers and not form.reordered and (half := _half_of_dummies(form)) is not None:
        least, most = _DUMMY_LARGEST
        scales = _in_turn((least / half, most / half), form.integers[0][1] or inputs, out)
        for expert in out:
            expert.copy_(torch.randint(-half, half, expert.shape, dtype=torch.int8)).mul_(scales)
    elif form.has_e4m3 and not form.integers:
        scales = _in_turn(_DUMMY_FP8_SCALES, _DUMMY_FP8_GROUP if form.block is None else form.block[1], out)
        for expert in out:
            codes = torch.randint(0, 2 * _E4M3_NAN, expert.shape, dtype=torch.uint8)
            codes += codes >= _E4M3_NAN
            expert.copy_(codes.view(torch.float8_e4m3fn)).mul_(scales)


def _half_of_dummies(form: QuantisedForm) -> int | None:
    """Return half of how many integers a form has; None where they do not stay in 4 or in 8 bits."""
    if all(bits <= MOST_FOUR_BITS for bits, _ in form.integers):
        return 8
    return 128 if form.symmetric and all(bits == _BYTE_BITS for bits, _ in form.integers) else None


def _in_turn(scales: tuple[float, float], group: int, out: Tensor) -> Tensor:
    """Return a scale for each input of matrices `out`: neighbouring groups have two, and do not fit in a larger one."""
    groups = torch.arange(out.shape[2]) // group
    return torch.where(groups % 2 == 0, *scales).to(out.dtype)


class _Scratch:
    """Memory for one tensor after the other, the same again and again: the kernel clears new memory.

    There are two pieces, since who goes through tensors has one until the next is made. A tensor that is kept keeps its
    memory, and the next ones have new memory.
    """

    def __init__(self) -> None:
        self._pieces = [_Piece(), _Piece()]

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor that holds anything. Its memory is used again when it and all views of it are gone."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        free = [one for one in self._pieces if one.user() is None]
        piece = max(free, key=lambda one: len(one.whole)) if free else self._pieces[0]
        if not free or len(piece.whole) < num_bytes:
            piece.whole = huge_buffer(num_bytes)
        part = piece.whole[:num_bytes]
        piece.user = weakref.ref(part)
        return torch.frombuffer(part, dtype=torch.uint8).view(dtype).view(shape)


@dataclass(slots=True)
class _Piece:
    """Memory, and what returns its user while there is one."""

    whole: memoryview = field(default_factory=lambda: memoryview(b""))
    user: Callable[[], memoryview | None] = lambda: None


Rows = Callable[[int, int], Tensor]
"""Returns the floats of the rows [first, last) of a matrix [outputs, inputs], in float32."""


def mxfp4_floats(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write all experts' matrices of a layer to `out` [experts, outputs, inputs].

    `blocks` [experts, outputs, inputs / 32, 16]: two numbers of 4 bits a byte, the lower bits first. `scales`
    [experts, outputs, inputs / 32]: exponents of two, plus 127.
    """
    kernels = native_kernels()
    if kernels is None or out.dtype != torch.bfloat16:
        _widen_plainly(blocks, scales, out)
    else:
        kernels.widen_mxfp4_(blocks.flatten(2).flatten(0, 1), scales.flatten(0, 1), out.flatten(0, 1))


def _widen_plainly(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    numbers = torch.tensor([*_E2M1, *(-one for one in _E2M1)], dtype=out.dtype)
    pairs = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), dim=-1)  # by byte
    as_words = pairs.view(torch.int32 if out.dtype.itemsize == 2 else torch.int64).flatten()
    powers = torch.exp2(torch.arange(256, dtype=torch.float64) - _E8M0_BIAS).to(out.dtype)
    for expert, (own_blocks, own_scales) in enumerate(zip(blocks, scales, strict=True)):
        words = torch.index_select(as_words, 0, own_blocks.flatten().int())
        own = words.view(out.dtype).view(*own_scales.shape, -1) * powers[own_scales.int()].unsqueeze(-1)
        out[expert] = own.flatten(1)


def _widen_scaled(parts: Parts, block: tuple[int, int] | None, out: Tensor) -> bool:
    """Write a matrix of 8 bits to `out` [outputs, inputs] by the native kernels, and return whether they take it."""
    kernels, weight, zeros = native_kernels(), parts[".weight"].contiguous(), parts.get(".weight_zero_point")
    if kernels is None or out.dtype != torch.bfloat16:
        return False
    scale = next(part for end, part in parts.items() if "scale" in end).float()
    own, (rows, columns) = _block_of(scale, weight.shape, block), weight.shape
    if weight.dtype == torch.float8_e4m3fn and zeros is None:
        kernels.widen_fp8_(weight, scale.reshape(-1, -(-columns // own[1])).contiguous(), *own, out)
        return True
    if weight.dtype != torch.int8 or own[1] != columns or columns % 2 != 0:
        return False
    lack = torch.zeros(1, dtype=torch.float32) if zeros is None else zeros.float()
    of_rows = [one.reshape(-1, 1).expand(rows, 1).contiguous() for one in (lack, scale)]
    kernels.widen_integers_(weight, *of_rows, out)
    return True


def _block_of(scale: Tensor, shape: Sequence[int], block: tuple[int, int] | None) -> tuple[int, int]:
    """Return how many rows and columns of a matrix of `shape` share a scale: all, those of a row, or of a `block`."""
    rows, columns = shape
    if scale.numel() == 1:
        return rows, columns
    if scale.shape[0] == rows and (scale.dim() != 2 or scale.shape[1] == 1):
        return 1, columns
    assert block is not None, "scales of blocks are found only where the form has blocks"
    return block


def _scaled(parts: Parts, block: tuple[int, int] | None) -> Rows:
    weight = parts[".weight"]
    scale = next(part for end, part in parts.items() if "scale" in end).float()
    zeros = parts.get(".weight_zero_point")
    own = _block_of(scale, weight.shape, block)
    if scale.numel() in (1, weight.shape[0]) and own[1] == weight.shape[1]:
        by_row = scale.reshape(-1, 1).expand(weight.shape[0], 1)
        lack = None if zeros is None else zeros.float().reshape(-1, 1).expand(weight.shape[0], 1)

        def of_rows(first: int, last: int) -> Tensor:
            numbers = weight[first:last].float()
            return (numbers if lack is None else numbers - lack[first:last]) * by_row[first:last]

        return of_rows
    by_column = scale.repeat_interleave(own[1], dim=1)[:, : weight.shape[1]]

    def of_blocks(first: int, last: int) -> Tensor:
        return weight[first:last].float() * by_column[torch.arange(first, last) // own[0]]

    return of_blocks


def _words(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers of the words of 32 bits of each row, uint8, lower bits first."""
    integers = words.contiguous().view(torch.uint8)
    for width in range(8 // bits // 2):
        # Of each byte's bits the upper half goes to a byte of its own.
        half = 4 >> width
        spread = integers.to(torch.int16)
        integers = (spread | spread << (8 - half)).bitwise_and_(((1 << half) - 1) * 0x101).view(torch.uint8)
    return integers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Integers:
    """Integers of a matrix [outputs, inputs], each less what its group lacks, times the group's scale.

    Attributes:
        stored: One a byte, uint8; or eight of 4 bits a word, the first one lowest, int32 [outputs, inputs / 8, rounded
            up], in any strides.
        lack: Zero points [outputs, groups], float32.
        scales: Likewise.
        order: The group of each input; groups of equal size one after the other if None.
    """

    stored: Tensor
    lack: Tensor
    scales: Tensor
    order: Tensor | None = None

    def widen(self, out: Tensor) -> bool:
        """Write the floats to `out` by the native kernels; return False if they do not take them."""
        kernels, groups, inputs = native_kernels(), self.scales.shape[1], out.shape[1]
        per_word = WORD_BITS // _WORD_INTEGER_BITS if self.stored.dtype == torch.int32 else 1
        fit = self.stored.shape[1] * per_word == inputs and inputs % (2 * groups) == 0 and self._is_in_order(inputs)
        if kernels is None or out.dtype != torch.bfloat16 or not fit:
            return False
        stored = self.stored if per_word > 1 else self.stored.contiguous()
        kernels.widen_integers_(stored, self.lack.contiguous(), self.scales.contiguous(), out)
        return True

    def of_rows(self, inputs: int) -> Rows:
        groups = self.scales.shape[1]
        if inputs % groups == 0 and self._is_in_order(inputs):

            def of_groups(first: int, last: int) -> Tensor:
                numbers: Tensor = self._numbers(first, last, inputs).unflatten(1, (groups, -1))
                own = self.lack[first:last].unsqueeze(2), self.scales[first:last].unsqueeze(2)
                return numbers.sub_(own[0]).mul_(own[1]).flatten(1)

            return of_groups
        group = self._neighbours(inputs) if self.order is None else self.order.long()

        def of_inputs(first: int, last: int) -> Tensor:
            numbers = self._numbers(first, last, inputs)
            return (numbers - self.lack[first:last][:, group]) * self.scales[first:last][:, group]

        return of_inputs

    def _numbers(self, first: int, last: int, inputs: int) -> Tensor:
        own = self.stored[first:last]
        return (_words(own, _WORD_INTEGER_BITS) if own.dtype == torch.int32 else own)[:, :inputs].float()

    def _is_in_order(self, inputs: int) -> bool:
        return self.order is None or torch.equal(self.order.long(), self._neighbours(inputs))

    def _neighbours(self, inputs: int) -> Tensor:
        return torch.arange(inputs) // -(-inputs // self.scales.shape[1])


def _gptq(parts: Parts, bits: int, zero_lack: int) -> _Integers:
    words, zeros = parts[".qweight"].t(), _words(parts[".qzeros"], bits).int() + zero_lack
    return _Integers(
        stored=words if bits == _WORD_INTEGER_BITS else _words(words, bits),
        lack=zeros.float().t(),
        scales=parts[".scales"].float().t(),
        order=parts.get(".g_idx"),
    )


def _awq(parts: Parts, bits: int, zero_lack: int) -> _Integers:
    words, zeros = parts[".qweight"].t().contiguous(), parts[".qzeros"]
    integers = torch.empty(words.shape[0], len(_AWQ_ORDER), words.shape[1], dtype=torch.uint8)
    for output, place in enumerate(_AWQ_ORDER):
        integers[:, output] = (words >> (place * bits)).bitwise_and_((1 << bits) - 1)
    of_zeros = _words(zeros, bits).unflatten(-1, (-1, len(_AWQ_ORDER)))[..., torch.tensor(_AWQ_ORDER)]
    return _Integers(
        stored=integers.flatten(0, 1),
        lack=(of_zeros.flatten(1).int() + zero_lack).float().t(),
        scales=parts[".scales"].float().t(),
    )


def _packed(parts: Parts, bits: int, shape: Sequence[int]) -> _Integers:
    words, scales = parts[".weight_packed"], parts[".weight_scale"].float()
    zeros, half = parts.get(".weight_zero_point"), 1 << (bits - 1)
    lack = torch.zeros_like(scales)
    if zeros is not None and zeros.dtype == torch.int32 and zeros.shape != scales.shape:
        lack = _words(zeros.t(), bits).t()[: shape[0]].float() - half
    elif zeros is not None:
        lack = zeros.float()
    return _Integers(
        stored=words if bits == _WORD_INTEGER_BITS else _words(words, bits)[:, : shape[1]],
        lack=lack + half,
        scales=scales,
        order=parts.get(".weight_g_idx"),
    )


def _are_finite(scales: Tensor) -> bool:
    if scales.dtype == torch.uint8:
        return not bool((scales == _E8M0_NAN).any())
    return bool(torch.isfinite(scales.float()).all())
