"""Owns how quantised checkpoints store matrices: which tensors make up one, and its name and shape as floats.

It reads headers, and no weights. `weights.dequantised` computes the floats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import NoReturn

from sgl_batch.checkpoint.files import StoredTensor, few
from sgl_batch.core.quantised_form import QuantisedForm
from sgl_batch.errors import ConfigError

# Numbers of a block of mxfp4, which have one scale, and numbers of a byte.
MXFP4_BLOCK, _MXFP4_PER_BYTE = 32, 2
WORD_BITS = 32
MOST_FOUR_BITS = 4
"""Of the integers that a CPU keeps in 4 bits."""
_E4M3 = "F8_E4M3"
_INT8 = "I8"
_EIGHT_BITS = (_E4M3, "F8_E5M2", _INT8)
# Matrices that an engine keeps in one form: their names, a name for them together, and whether it puts them side by
# side for one product. These are the experts of a layer, the matrices of an MLP, and those that attention begins with.
_KEPT_ALIKE = (
    (re.compile(r"^(.*\.experts)\.(?:.*\.weight|[^.]*_proj)$"), r"\1", False),
    (re.compile(r"^(.*\.)(?:gate|up|gate_up|down)_proj\.weight$"), r"\1mlp", False),
    (re.compile(r"^(.*\.)[qkv]_proj\.weight$"), r"\1qkv_proj", True),
    (re.compile(r"^(.*\.)(?:q_a_proj|kv_a_proj_with_mqa)\.weight$"), r"\1fused_qkv_a_proj_with_mqa", True),
)
# Those that are kept as floats: they choose experts and tokens, or are multiplied head by head.
_KEPT_AS_FLOATS = re.compile(r"(?:^|\.)(?:lm_head|gate|router|shared_expert_gate|kv_b_proj)\.weight$")
# Scales of activations and of KV, which floats do not need.
_OF_ACTIVATIONS = re.compile(r"\.(input_scale|input_zero_point|output_scale|activation_scale|[qkv]_scale)$")


@dataclass(frozen=True, slots=True)
class GroupedBits:
    """A form in which a CPU keeps numbers of bfloat16 in fewer bits: neighbours in groups share a scale.

    Attributes:
        bits: Of a number: 4 or 8.
        group: How many neighbours share a scale.
        scale_bytes: Of a scale.
        is_int8: Whether numbers of 8 bits are integers, not floats.
    """

    bits: int
    group: int
    scale_bytes: int
    is_int8: bool = False

    def num_bytes(self, count: int) -> int:
        """Return the bytes of so many numbers, whole groups."""
        return count * self.bits // 8 + count // self.group * self.scale_bytes

    def is_like(self, other: GroupedBits) -> bool:
        """Return whether the forms differ in the size of groups at most."""
        return replace(self, group=other.group) == other


MXFP4_BITS = GroupedBits(bits=4, group=MXFP4_BLOCK, scale_bytes=1)
# Integers whose zero point is in the scale's word, numbers of e4m3, and integers without a zero point. Larger groups
# are several of these.
INTEGER_BITS = tuple(GroupedBits(bits=4, group=group, scale_bytes=4) for group in (128, 64, 32))
FP8_BITS = tuple(GroupedBits(bits=8, group=group, scale_bytes=4) for group in (128, 32))
INT8_BITS = tuple(replace(one, is_int8=True) for one in FP8_BITS)
_KEPT_IN_8_BITS = {_E4M3: FP8_BITS, _INT8: INT8_BITS}


class Kind(StrEnum):
    """How the numbers of a matrix are stored."""

    SCALED = "scaled"  # 8 bits each, with a scale for the matrix, each row, or each block
    MXFP4 = "mxfp4"  # all experts of a layer, 4 bits each, with a scale for 32
    GPTQ = "gptq"
    AWQ = "awq"
    PACKED = "packed"  # integers of compressed-tensors


# By kind, the ends of the names of its tensors; optional ones last.
_PARTS: Mapping[Kind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    Kind.MXFP4: (("_blocks", "_scales"), ()),
    Kind.GPTQ: ((".qweight", ".scales", ".qzeros"), (".g_idx",)),
    Kind.AWQ: ((".qweight", ".scales", ".qzeros"), ()),
    Kind.PACKED: ((".weight_packed", ".weight_scale"), (".weight_shape", ".weight_zero_point", ".weight_g_idx")),
    Kind.SCALED: ((".weight",), (".weight_scale_inv", ".weight_scale", ".weight_zero_point")),
}
_KINDS: Mapping[str, tuple[Kind, ...]] = {
    "mxfp4": (Kind.MXFP4,),
    "gptq": (Kind.GPTQ,),
    "awq": (Kind.AWQ,),
    "fp8": (Kind.SCALED,),
    "compressed-tensors": (Kind.PACKED, Kind.SCALED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedMatrix:
    """A matrix, or all experts' of a layer, of a quantised checkpoint.

    Attributes:
        name: The tensor's name in a checkpoint of floats.
        kind: How its numbers are stored.
        shape: Of its floats, [outputs, inputs]; of experts of a layer [experts, inputs, outputs].
        parts: The stored tensors by the end of their names.
        bits: Of a packed integer; 0 for other kinds.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    parts: Mapping[str, StoredTensor]
    bits: int = 0

    @property
    def begin(self) -> str:
        """What the names of its tensors begin with."""
        return self.name.removesuffix(".weight")

    @property
    def outputs(self) -> int:
        return self.shape[2] if self.kind is Kind.MXFP4 else self.shape[0]

    @property
    def inputs(self) -> int:
        return self.shape[1]

    @property
    def scales(self) -> StoredTensor:
        return next(part for end, part in self.parts.items() if "scale" in end)

    @property
    def num_groups(self) -> int:
        """How many groups of an output's inputs share a scale, of packed integers."""
        return self.scales.shape[1 if self.kind is Kind.PACKED else 0]

    def grouped(self, form: QuantisedForm) -> GroupedBits | None:
        """Return the form of 4 or 8 bits in which its numbers can stay in memory; None if there is none.

        `form`: how the checkpoint is quantised.
        """
        if is_kept_as_floats(self.name):
            return None
        forms: Sequence[GroupedBits] = ()
        if self.kind is Kind.MXFP4:
            forms = (MXFP4_BITS,)
        elif self.kind is Kind.SCALED:
            if ".weight_zero_point" not in self.parts:
                forms = _KEPT_IN_8_BITS.get(self.parts[".weight"].dtype, ())
        elif not form.reordered and ".weight_g_idx" not in self.parts:
            has_zeros = not form.symmetric if self.kind is Kind.GPTQ else ".weight_zero_point" in self.parts
            forms = INTEGER_BITS if self.bits <= MOST_FOUR_BITS else () if has_zeros else INT8_BITS
        sharing = self._num_sharing(form.block)
        return next((one for one in forms if self.inputs % one.group == sharing % one.group == 0), None)

    def _num_sharing(self, block: tuple[int, int] | None) -> int:
        """Return how many neighbouring inputs share a scale, `block` where scales are of blocks; 1 if it varies."""
        if self.kind is Kind.MXFP4:
            return MXFP4_BLOCK
        if self.kind is Kind.SCALED:
            scales = self.scales.shape
            has_columns = len(scales) == 2 and scales[1] > 1
            return block[1] if block is not None and has_columns else self.inputs
        return self.inputs // self.num_groups if self.inputs % self.num_groups == 0 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedTensors:
    """The quantised tensors of a checkpoint.

    Attributes:
        form: How they are quantised.
        matrices: The matrices by their name as floats.
        unused: Tensors that floats do not need.
        plain: Tensors that are not quantised.
    """

    form: QuantisedForm
    matrices: Mapping[str, QuantisedMatrix]
    unused: frozenset[str]
    plain: frozenset[str] = frozenset()

    def matrix_of(self) -> dict[str, tuple[str, str]]:
        """Return by the name of each stored part its matrix's name and the end of its own."""
        return {one.begin + end: (name, end) for name, one in self.matrices.items() for end in one.parts}

    @property
    def grouped(self) -> dict[str, GroupedBits]:
        """Names of matrices that a CPU keeps in 4 or 8 bits, and how: those that are kept in one form alike."""
        alike: dict[tuple[str, bool], list[QuantisedMatrix]] = {}
        for name, one in self.matrices.items():
            alike.setdefault(_kept_with(name), []).append(one)
        found: dict[str, GroupedBits] = {}
        for name in self.plain:
            alike.pop(_kept_with(name), None)
        for (_, side_by_side), matrices in alike.items():
            forms = [one.grouped(self.form) for one in matrices]
            known = [form for form in forms if form is not None]
            outputs = [one.outputs for one in matrices]
            fills_panels = all(one % MXFP4_BLOCK == 0 for one in ([sum(outputs)] if side_by_side else outputs))
            are_alike = len(known) == len(forms) and all(known[0].is_like(form) for form in known)
            if are_alike and fills_panels:
                smallest = min(known, key=lambda form: form.group)
                found |= {one.name: smallest for one in matrices}
        return found

    def as_floats(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the tensors of a checkpoint with its matrices as they are in bfloat16. Their bytes are in no file."""
        parts = self.matrix_of()
        plain = {name: one for name, one in tensors.items() if name not in parts and name not in self.unused}
        for name, matrix in self.matrices.items():
            first = next(iter(matrix.parts.values()))
            plain[name] = StoredTensor(first.file, "BF16", matrix.shape, first.begin, 2 * prod(matrix.shape))
        return plain


def find_quantised(tensors: Mapping[str, StoredTensor], form: QuantisedForm) -> QuantisedTensors:
    """Find the quantised matrices among a checkpoint's tensors. Raises ConfigError for one that is not complete."""
    kinds = _KINDS[form.method]
    found: dict[str, QuantisedMatrix] = {}
    for name, tensor in tensors.items():
        for kind in kinds:
            needed, optional = _PARTS[kind]
            if name.endswith(needed[0]) and (kind is not Kind.SCALED or tensor.dtype in _EIGHT_BITS):
                begin = name.removesuffix(needed[0])
                matrix = _matrix(kind, begin, tensors, form, (needed, optional))
                found[matrix.name] = matrix
    unused = frozenset(name for name in tensors if _OF_ACTIVATIONS.search(name))
    plain = tensors.keys() - {one.begin + end for one in found.values() for end in one.parts} - unused
    quantised = QuantisedTensors(form=form, matrices=found, unused=unused, plain=frozenset(plain))
    _check_no_rest(tensors, quantised, kinds)
    return quantised


def _matrix(
    kind: Kind,
    begin: str,
    tensors: Mapping[str, StoredTensor],
    form: QuantisedForm,
    ends: tuple[Sequence[str], Sequence[str]],
) -> QuantisedMatrix:
    needed, optional = ends
    if absent := [end for end in needed if begin + end not in tensors]:
        raise ConfigError(
            f"the checkpoint has {begin}{needed[0]}, quantised by {form.method}, and no {begin}{absent[0]}: fetch the "
            "files anew"
        )
    parts = {end: tensors[begin + end] for end in (*needed, *optional) if begin + end in tensors}
    shape, bits = _SHAPES[kind](begin, parts, form)
    name = begin if kind is Kind.MXFP4 else f"{begin}.weight"
    return QuantisedMatrix(name=name, kind=kind, shape=shape, parts=parts, bits=bits)


def plain_name(name: str) -> str:
    """Return the name that the matrix of a stored part has in a checkpoint of floats; other names as they are."""
    for kind, (needed, optional) in _PARTS.items():
        for end in (*needed, *optional):
            if name.endswith(end):
                return name.removesuffix(end) + ("" if kind is Kind.MXFP4 else ".weight")
    return name


def is_kept_as_floats(name: str) -> bool:
    """Return whether the matrix of this name takes no form of 4 or 8 bits, whatever its numbers."""
    return _KEPT_AS_FLOATS.search(name) is not None


def _kept_with(name: str) -> tuple[str, bool]:
    """Return a name for the matrices that are kept in one form with this one, and whether they are side by side."""
    for names, together, side_by_side in _KEPT_ALIKE:
        if names.match(name):
            return names.sub(together, name), side_by_side
    return name, False


_Parts = Mapping[str, StoredTensor]
_Shape = tuple[tuple[int, ...], int]


def _scaled(begin: str, parts: _Parts, form: QuantisedForm) -> _Shape:
    shape = parts[".weight"].shape
    scales = [parts[end].shape for end in (".weight_scale_inv", ".weight_scale") if end in parts]
    if len(scales) != 1 or len(shape) != 2:
        _fail(begin, parts, f"a matrix of 8 bits has one tensor of scales, and {len(scales)} are there")
    fitting = [(), (1,), (1, 1), (shape[0],), (shape[0], 1)]
    if form.block is not None:
        fitting.append((-(-shape[0] // form.block[0]), -(-shape[1] // form.block[1])))
    if scales[0] not in fitting:
        _fail(begin, parts, f"scales are one, {shape[0]} of rows, or of blocks of {form.block}")
    return shape, 0


def _mxfp4(begin: str, parts: _Parts, _: QuantisedForm) -> _Shape:
    blocks, scales = parts["_blocks"], parts["_scales"]
    in_bytes = MXFP4_BLOCK // _MXFP4_PER_BYTE
    if len(blocks.shape) != 4 or blocks.shape != (*scales.shape, in_bytes) or {blocks.dtype, scales.dtype} != {"U8"}:
        _fail(begin, parts, f"blocks are bytes [experts, outputs, blocks, {in_bytes}], with a scale of a byte each")
    experts, outputs, count = scales.shape
    return (experts, count * MXFP4_BLOCK, outputs), 0


def _gptq(begin: str, parts: _Parts, _: QuantisedForm) -> _Shape:
    words, scales, zeros = parts[".qweight"], parts[".scales"], parts[".qzeros"]
    order = parts.get(".g_idx")
    if not len(words.shape) == len(scales.shape) == len(zeros.shape) == 2:
        _fail(begin, parts, "all have two dimensions")
    # As many words as zero points have for an output: so many integers lie in a word.
    outputs, groups = words.shape[1], scales.shape[0]
    per_word, rest = divmod(outputs, max(1, zeros.shape[1]))
    inputs = words.shape[0] * per_word
    fits = (
        rest == 0
        and per_word in (4, 8, 16)
        and scales.shape[1] == outputs
        and zeros.shape[0] == groups
        and (order is None or order.shape == (inputs,))
        and (order is not None or (groups > 0 and inputs % groups == 0))
    )
    if not fits:
        _fail(begin, parts, "words are [inputs / n, outputs], zeros [groups, outputs / n], scales [groups, outputs]")
    return (outputs, inputs), WORD_BITS // per_word


def _awq(begin: str, parts: _Parts, _: QuantisedForm) -> _Shape:
    words, scales, zeros = parts[".qweight"], parts[".scales"], parts[".qzeros"]
    if not len(words.shape) == len(scales.shape) == len(zeros.shape) == 2:
        _fail(begin, parts, "all have two dimensions")
    inputs, outputs, groups = words.shape[0], words.shape[1] * 8, scales.shape[0]
    fits = scales.shape[1] == outputs and zeros.shape == (groups, words.shape[1]) and groups and inputs % groups == 0
    if not fits:
        _fail(begin, parts, "words are [inputs, outputs / 8], zeros [groups, outputs / 8], scales [groups, outputs]")
    return (outputs, inputs), WORD_BITS // 8


def _packed(begin: str, parts: _Parts, form: QuantisedForm) -> _Shape:
    words, scales = parts[".weight_packed"].shape, parts[".weight_scale"].shape
    if len(words) == 2 and len(scales) == 2 and scales[0] == words[0]:
        for bits, per_scale in form.integers:
            inputs = scales[1] * per_scale if per_scale is not None else words[1] * WORD_BITS // bits
            if words[1] == -(-inputs // (WORD_BITS // bits)) and (per_scale is not None or scales[1] == 1):
                return (words[0], inputs), bits
    return _fail(
        begin, parts, f"words are [outputs, inputs / n], scales [outputs, groups]; config.json has {form.integers}"
    )


_SHAPES = {
    Kind.SCALED: _scaled,
    Kind.MXFP4: _mxfp4,
    Kind.GPTQ: _gptq,
    Kind.AWQ: _awq,
    Kind.PACKED: _packed,
}


def _fail(begin: str, parts: _Parts, needed: str) -> NoReturn:
    shapes = ", ".join(f"{end.lstrip('._')} {one.dtype}{list(one.shape)}" for end, one in parts.items())
    file = next(iter(parts.values())).file
    raise ConfigError(
        f"the tensors of {begin} in {file} do not belong together ({shapes}): {needed}; quantise the model again, or "
        "fetch the files and the config of one checkpoint"
    )


def _check_no_rest(tensors: Mapping[str, StoredTensor], quantised: QuantisedTensors, kinds: Iterable[Kind]) -> None:
    """Raise ConfigError for parts of matrices that have no matrix."""
    known = quantised.matrix_of().keys() | quantised.unused
    ends = tuple({end for kind in kinds for group in _PARTS[kind] for end in group} - {".weight"})
    if rest := [name for name in tensors if name.endswith(ends) and name not in known]:
        raise ConfigError(
            f"the checkpoint has {len(rest)} tensors of quantised matrices that are not complete: {few(rest)}; fetch "
            "the files anew"
        )
