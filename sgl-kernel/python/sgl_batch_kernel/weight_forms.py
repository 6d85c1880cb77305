"""The operators that give weights the forms in which products read them, typed. What uses a form is in the package."""

from __future__ import annotations

import torch

_ops = torch.ops.sgl_batch_kernel


def pack_(weight: torch.Tensor) -> None:
    """Pack plain matrices [B, N, K], bf16 or int8 (K even) or f32, in place for `experts` and `linear`."""
    _ops.pack_(weight)


def unpack_(weight: torch.Tensor) -> None:
    """Undo `pack_`."""
    _ops.unpack_(weight)


def round_to_int8_(weight: torch.Tensor, rounded: torch.Tensor, scales: torch.Tensor) -> None:
    """Round plain matrices [B, N, K] of bf16 or f32 to `rounded`, int8 [B, N, K], with `scales`, f32 [B, N].

    The largest number of an output becomes 127, others round to nearest, ties to even. An output of zeros has scale 1.
    Where numbers of bf16 are the integers of one scale, rounded, of which the largest is 127 or 128, they become these.
    """
    _ops.round_to_int8_(weight, rounded, scales)


def pack_coded_(weight: torch.Tensor) -> torch.Tensor:
    """Pack plain matrices [B, N, K] of bf16 in place, K even, and code whole panels: 12 bits a number, no loss.

    Returns a mark for each panel, uint8 [B, N / 32, rounded up]: 0 for one that is packed only, since too many of its
    numbers have exponents of their own or K is no multiple of 4. `experts` needs the marks beside the weight.
    """
    marks: torch.Tensor = _ops.pack_coded_(weight)
    return marks


def uncode_(weight: torch.Tensor, marks: torch.Tensor) -> None:
    """Undo the codes of `pack_coded_`; what is left is as after `pack_`."""
    _ops.uncode_(weight, marks)


def pack_fp4_(weight: torch.Tensor, packed: torch.Tensor) -> bool:
    """Pack plain matrices [B, N, K] of bf16, N and K multiples of 32, whose numbers are all those of mxfp4.

    Of each output, 32 neighbouring inputs are then numbers of 4 bits times one power of two. `packed`: uint8
    [B, N, K * 17 / 32]. Returns False where a number is none of these; what `packed` holds is then undefined.
    """
    exact: bool = _ops.pack_fp4_(weight, packed)
    return exact


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Return the plain matrices [B, N, K] of bf16 that `pack_fp4_` has packed."""
    plain: torch.Tensor = _ops.unpack_fp4(packed)
    return plain


def pack_int4_(weight: torch.Tensor, packed: torch.Tensor) -> bool:
    """Pack plain matrices [B, N, K] of bf16, N a multiple of 32 and K of `group`, that are rounded integers of 4 bits.

    Of each output, `group` neighbouring inputs, 32, 64 or 128, are then scale * (integer - zero point), rounded to
    bf16. `packed`: int32 [B, N, K / 8 + K / group], whose size gives the group. Returns False where numbers are none of
    these; what `packed` holds is then undefined.
    """
    exact: bool = _ops.pack_int4_(weight, packed)
    return exact


def unpack_int4(packed: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the plain matrices [B, N, inputs] of bf16 that `pack_int4_` has packed, but for the sign of zeros."""
    plain: torch.Tensor = _ops.unpack_int4(packed, inputs)
    return plain


def pack_fp8_(weight: torch.Tensor, packed: torch.Tensor) -> bool:
    """Pack plain matrices [B, N, K] of bf16, N a multiple of 32 and K of `group`, that are rounded floats of 8 bits.

    Of each output, `group` neighbouring inputs, 32 or 128, are then scale * number of e4m3, rounded to bf16. `packed`:
    float8_e4m3fn [B, N, K + 4 * K / group], whose size gives the group. Returns False where numbers are none of these;
    what `packed` holds is then undefined.
    """
    exact: bool = _ops.pack_fp8_(weight, packed)
    return exact


def unpack_fp8(packed: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the plain matrices [B, N, inputs] of bf16 that `pack_fp8_` has packed."""
    plain: torch.Tensor = _ops.unpack_fp8(packed, inputs)
    return plain


def pack_int8_groups_(weight: torch.Tensor, packed: torch.Tensor) -> bool:
    """Pack plain matrices [B, N, K] of bf16, N a multiple of 32 and K of `group`, that are rounded integers of 8 bits.

    Of each output, `group` neighbouring inputs, 32 or 128, are then scale * integer, rounded to bf16. `packed`: int16
    [B, N, K / 2 + 2 * K / group], whose size gives the group. Returns False where numbers are none of these; what
    `packed` holds is then undefined.
    """
    exact: bool = _ops.pack_int8_groups_(weight, packed)
    return exact


def unpack_int8_groups(packed: torch.Tensor, inputs: int) -> torch.Tensor:
    """Return the plain matrices [B, N, inputs] of bf16 that `pack_int8_groups_` has packed, but for signs of zeros."""
    plain: torch.Tensor = _ops.unpack_int8_groups(packed, inputs)
    return plain


def widen_mxfp4_(blocks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Take rows of mxfp4 to `out`, bf16 [N, K], K a multiple of 32, as they lie in checkpoints.

    `blocks`: uint8 [N, K / 2], two numbers of 4 bits a byte, the even one lower. `scales`: uint8 [N, K / 32], powers of
    two plus 127.
    """
    _ops.widen_mxfp4_(blocks, scales, out)


def widen_fp8_(
    numbers: torch.Tensor, scales: torch.Tensor, block_rows: int, block_columns: int, out: torch.Tensor
) -> None:
    """Take numbers of e4m3 [N, K] times scales to `out`, bf16 [N, K]: computed in float32, rounded once.

    `scales`: float32 [N / block_rows, K / block_columns], rounded up, one for each block.
    """
    _ops.widen_fp8_(numbers, scales, block_rows, block_columns, out)


def widen_integers_(integers: torch.Tensor, lacks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Take integers of groups to `out`, bf16 [N, K]: (integer - lack) * scale, computed in float32, rounded once.

    `integers`: int32 [N, K / 8], eight of 4 bits a word, the first one lowest, in any strides; or contiguous uint8 or
    int8 [N, K]. `lacks` and `scales`: float32 [N, groups], of K / groups neighbours each, an even number.
    """
    _ops.widen_integers_(integers, lacks, scales, out)


def copy_past_caches_(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to a tensor of the same shape and number type, both contiguous, leaving the caches to others.

    For large tensors that are not read soon. The two do not overlap.
    """
    _ops.copy_past_caches_(to, source)
