"""Decides from a model's config how its weights are quantised, and whether they can be taken back to floats.

A form says what tensors alone do not: `checkpoint.quantised` finds the matrices in the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Bits of GPTQ's integers that fill words of 32.
_WHOLE_BITS = (2, 4, 8)
_AWQ_BITS = 4
_HALF_BYTE, _BYTE = 4, 8
_MXFP4, _COMPRESSED = "mxfp4", "compressed-tensors"
_AWQ_LAYOUT = "gemm"
_E4M3 = "e4m3"
_GPTQ_LAYOUTS = {"gptq": 1, "gptq_v2": 0}  # by name: what its zero points lack
_COMPRESSED_LAYOUTS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedForm:
    """How the weights of a checkpoint are quantised.

    Attributes:
        method: As the config names it.
        block: Rows and columns of a block with one scale, of matrices of 8 bits; None where none has blocks.
        zero_lack: What is added to GPTQ's stored zero points.
        integers: Of packed integers, by group of layers: bits, and how many inputs share a scale; None for all of a
            row. GPTQ and AWQ have one such group; the tensors' shapes say the same.
        symmetric: Whether zero points of integers are all half of what their bits count, as far as the config says.
        reordered: Whether inputs that share a scale need not be neighbours (GPTQ's desc_act).
        has_e4m3: Whether matrices of 8 bits are floats of e4m3, as far as the config says. The tensors say the same.
        for_int8_rows: Whether the model was made for rows that are rounded to int8, each by itself (W8A8).
    """

    method: str
    block: tuple[int, int] | None = None
    zero_lack: int = 0
    integers: tuple[tuple[int, int | None], ...] = ()
    symmetric: bool = False
    reordered: bool = False
    has_e4m3: bool = False
    for_int8_rows: bool = False

    @property
    def is_streamable(self) -> bool:
        """Whether a CPU may read experts from the files while the model runs.

        These are fp8 of e4m3, mxfp4, integers of 4 bits whose groups are neighbours, and bytes without zero points.
        """
        if not self.integers:
            return self.has_e4m3 or self.method == _MXFP4
        in_bytes = self.method == _COMPRESSED and self.symmetric and all(bits == _BYTE for bits, _ in self.integers)
        return (in_bytes or self.in_four_bits) and not self.has_e4m3

    @property
    def in_four_bits(self) -> bool:
        """Whether all quantised matrices are mxfp4, or integers of 4 bits whose groups are neighbours."""
        in_four = all(bits == _HALF_BYTE for bits, _ in self.integers)
        return self.method == _MXFP4 or (bool(self.integers) and in_four and not self.reordered)


class QuantisedFormError(ValueError):
    """Weights are quantised in a form that is not taken back to floats. The text says which."""


def quantised_form(asked: Mapping[str, Any]) -> QuantisedForm:
    """Return the form that a config's `quantization_config` describes. Raises QuantisedFormError."""
    method = str(asked.get("quant_method", "unknown"))
    read = _FORMS.get(method)
    if read is None:
        raise QuantisedFormError(f"{method}, which is none of {', '.join(sorted(_FORMS))}")
    try:
        return read(method, asked)
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, QuantisedFormError):
            raise
        raise QuantisedFormError(f"{method}, whose fields in config.json cannot be read ({error})") from error


def _mxfp4(method: str, _: Mapping[str, Any]) -> QuantisedForm:
    return QuantisedForm(method=method)


def _fp8(method: str, asked: Mapping[str, Any]) -> QuantisedForm:
    has_e4m3 = _E4M3 in str(asked.get("fmt") or _E4M3)
    return QuantisedForm(method=method, block=_pair(asked.get("weight_block_size")), has_e4m3=has_e4m3)


def _gptq(method: str, asked: Mapping[str, Any]) -> QuantisedForm:
    layout, bits = str(asked.get("checkpoint_format") or "gptq"), asked.get("bits")
    if layout not in _GPTQ_LAYOUTS or asked.get("is_marlin_format"):
        raise QuantisedFormError(f"{method} laid out for one GPU kernel (checkpoint_format {layout!r})")
    if bits not in _WHOLE_BITS:
        raise QuantisedFormError(f"{method} of {bits} bits, which is none of {_WHOLE_BITS}")
    return QuantisedForm(
        method=method,
        zero_lack=_GPTQ_LAYOUTS[layout],
        integers=((int(bits), _group_size(asked)),),
        symmetric=bool(asked.get("sym")),
        reordered=bool(asked.get("desc_act")),
    )


def _awq(method: str, asked: Mapping[str, Any]) -> QuantisedForm:
    layout, bits = str(asked.get("version") or _AWQ_LAYOUT).lower(), asked.get("bits")
    if layout != _AWQ_LAYOUT:
        raise QuantisedFormError(
            f"{method} laid out for another kernel (version {layout!r}, and {_AWQ_LAYOUT!r} is read)"
        )
    if bits != _AWQ_BITS:
        raise QuantisedFormError(f"{method} of {bits} bits, and {_AWQ_BITS} are read")
    return QuantisedForm(method=method, integers=((_AWQ_BITS, _group_size(asked)),))


def _compressed(method: str, asked: Mapping[str, Any]) -> QuantisedForm:
    groups = [one for one in (asked.get("config_groups") or {}).values() if one.get("weights")]
    layouts = {str(one.get("format") or asked.get("format")) for one in groups}
    if other := sorted(layouts - set(_COMPRESSED_LAYOUTS)):
        raise QuantisedFormError(
            f"{method} of the format {other[0]!r}, which is none of {', '.join(_COMPRESSED_LAYOUTS)}"
        )
    if (asked.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise QuantisedFormError(f"{method} of sparse weights")
    if (asked.get("transform_config") or {}).get("config_groups"):
        raise QuantisedFormError(f"{method} of weights that are rotated (transform_config)")
    integers, blocks, has_e4m3, symmetric = [], set(), False, True
    for one in (group["weights"] for group in groups):
        if one.get("strategy") == "block":
            blocks.add(_pair(one["block_structure"]))
        if one.get("type") == "int":
            integers.append((int(one["num_bits"]), _group_size(one)))
            symmetric &= bool(one.get("symmetric"))
        elif one.get("type") == "float":
            has_e4m3 = True
    if len(blocks) > 1:
        raise QuantisedFormError(f"{method} of blocks of several sizes")
    block = next(iter(blocks), None)
    return QuantisedForm(
        method=method,
        block=block,
        integers=tuple(integers),
        symmetric=bool(integers) and symmetric,
        has_e4m3=has_e4m3,
        for_int8_rows=bool(groups) and all(map(_has_int8_rows, groups)),
    )


def _has_int8_rows(group: Mapping[str, Any]) -> bool:
    rows = group.get("input_activations") or {}
    return (rows.get("num_bits"), rows.get("type"), rows.get("dynamic")) == (8, "int", True)


def _group_size(asked: Mapping[str, Any]) -> int | None:
    """Return how many inputs share a scale; None for all of a row."""
    size = asked.get("group_size")
    return int(size) if size and size > 0 else None


def _pair(value: Any) -> tuple[int, int] | None:
    if not value:
        return None
    rows, columns = value
    return int(rows), int(columns)


_FORMS = {"mxfp4": _mxfp4, "fp8": _fp8, "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}
