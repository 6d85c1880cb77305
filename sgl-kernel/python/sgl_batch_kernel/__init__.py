"""The operators of sgl_batch's native library, typed. They compute; who calls them decides what.

Importing it loads the library into torch (`torch.ops.sgl_batch_kernel`).
"""

from __future__ import annotations

from pathlib import Path

import torch

from .row_operators import add_rows as add_rows
from .row_operators import copy_rows as copy_rows
from .row_operators import mul_rows as mul_rows
from .row_operators import put_rows_ as put_rows_
from .row_operators import scale_rows as scale_rows
from .row_operators import sigmoid_rows as sigmoid_rows
from .shared_pass import own_choices as own_choices
from .shared_pass import sum_partials_ as sum_partials_
from .token_choice import argmax as argmax
from .token_choice import log_probabilities as log_probabilities
from .token_choice import mask_tokens as mask_tokens
from .token_choice import penalize_repetition as penalize_repetition
from .token_choice import sample as sample
from .weight_forms import copy_past_caches_ as copy_past_caches_
from .weight_forms import pack_ as pack_
from .weight_forms import pack_coded_ as pack_coded_
from .weight_forms import pack_fp4_ as pack_fp4_
from .weight_forms import pack_fp8_ as pack_fp8_
from .weight_forms import pack_int4_ as pack_int4_
from .weight_forms import pack_int8_groups_ as pack_int8_groups_
from .weight_forms import round_to_int8_ as round_to_int8_
from .weight_forms import uncode_ as uncode_
from .weight_forms import unpack_ as unpack_
from .weight_forms import unpack_fp4 as unpack_fp4
from .weight_forms import unpack_fp8 as unpack_fp8
from .weight_forms import unpack_int4 as unpack_int4
from .weight_forms import unpack_int8_groups as unpack_int8_groups
from .weight_forms import widen_fp8_ as widen_fp8_
from .weight_forms import widen_integers_ as widen_integers_
from .weight_forms import widen_mxfp4_ as widen_mxfp4_

INTERFACE = 20
"""Which functions there are and what they take; counts up whenever that changes."""

torch.ops.load_library(next(Path(__file__).parent.glob("_cpu*.so")))
_ops = torch.ops.sgl_batch_kernel


def isa() -> str:
    """The instruction set in use: the machine's best, or what SGL_BATCH_ISA names (RuntimeError if it lacks that)."""
    name: str = _ops.isa()
    return name


def runnable_isas() -> list[str]:
    """The instruction sets that this machine can run, best first."""
    names: str = _ops.runnable_isas()
    return names.split(",")


def keep_memory(most_bytes: int) -> None:
    """Let torch's CPU tensors of 2 MiB or more, from now on, take the memory that such tensors before them freed.

    It lies on huge pages if the kernel grants them. Of freed memory up to `most_bytes` are kept, the oldest goes first.
    Raises RuntimeError for less than 0.
    """
    _ops.keep_memory(most_bytes)


def reserve_memory(most_bytes: int, seconds: float, threads: int) -> int:
    """Have the operating system give memory now that scratch and large tensors take later, before they take any other.

    By so many threads, for about so many seconds. Returns how many bytes it has given, up to `most_bytes` rounded up to
    huge pages; 0 where it cannot, before Linux 5.14. What an earlier call left goes back. Raises RuntimeError for less
    than 0 bytes or 1 thread.
    """
    given: int = _ops.reserve_memory(most_bytes, seconds, threads)
    return given


def experts(
    x_TM: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    *,
    f32_output: bool = False,
    w13_scales: torch.Tensor | None = None,
    w2_scales: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    alpha: float | None = None,
    limit: float | None = None,
    w13_marks: torch.Tensor | None = None,
    w2_marks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run every token through its experts; returns the output [T, M] and rows per expert [E].

    `w13`: [E, 2I, M], of which the gate half [E, 0:I, M] and the up half are packed each by itself; `w2`: packed
    [E, M, I]. Weights of int8 have `w13_scales` [E, 2I] and `w2_scales` [E, M], float32. `topk_ids_TK`: int32, negative
    for a choice that belongs to nobody here; `topk_weights_TK`: f32. The output has x's number type, or f32 where
    `f32_output`. A token's result depends on that token alone.
    `slots` [E], int32: where w13 and w2 hold more than these experts, the place of each in them, or -1 for one that is
    not there and has no rows.
    `w13_bias` [E, 2I], gates first, and `w2_bias` [E, M], float32, are added to the products. With `alpha` and `limit`
    an expert computes g * sigmoid(alpha * g) * (u + 1) in place of SiLU(gate) * up, where g is gate up to limit, and u
    is up between -limit and limit.
    Weights that `pack_fp4_` has packed, uint8 [E, 2I, M * 17 / 32] and [E, M, I * 17 / 32], give the bits of bf16. So
    do those of `pack_int4_`, int32 [E, 2I, M / 8 + M / group] and [E, M, I / 8 + I / group], of `pack_fp8_`,
    float8_e4m3fn [E, 2I, M + 4 * M / group] and [E, M, I + 4 * I / group], and of `pack_int8_groups_`, int16
    [E, 2I, M / 2 + 2 * M / group] and [E, M, I / 2 + 2 * I / group].
    `w13_marks` [2E, panels of I] and `w2_marks` [E, panels of M] are those that `pack_coded_` returned where it has
    packed the weight; results have the bits of the weight as it was.
    """
    out: tuple[torch.Tensor, torch.Tensor] = _ops.experts(
        x_TM,
        w13,
        w2,
        topk_weights_TK,
        topk_ids_TK,
        f32_output,
        w13_scales,
        w2_scales,
        slots,
        w13_bias,
        w2_bias,
        alpha,
        limit,
        w13_marks,
        w2_marks,
    )
    return out


def int8_kernel() -> str:
    """The kernel that multiplies int8 by int8: the best one that the instruction set in use allows."""
    name: str = _ops.int8_kernel()
    return name


def pack_quads_(weight: torch.Tensor) -> None:
    """Pack plain int8 matrices [B, N, K] in place for `experts_int8` and `linear_int8`."""
    _ops.pack_quads_(weight)


def unpack_quads_(weight: torch.Tensor) -> None:
    """Undo `pack_quads_`."""
    _ops.unpack_quads_(weight)


def experts_int8(
    x_TM: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    *,
    w13_scales: torch.Tensor,
    w2_scales: torch.Tensor,
    f32_output: bool = False,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    alpha: float | None = None,
    limit: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `experts` with rows rounded to int8 before each product, and weights packed by `pack_quads_`.

    A row's largest number becomes 127, each number is rounded to nearest. Sums are exact, and are multiplied by the
    row's scale and then by the output's. What lies between the products is not rounded before it becomes int8. A row
    with a number that is not finite gives no numbers.
    """
    out: tuple[torch.Tensor, torch.Tensor] = _ops.experts_int8(
        x_TM,
        w13,
        w2,
        topk_weights_TK,
        topk_ids_TK,
        f32_output,
        w13_scales,
        w2_scales,
        w13_bias,
        w2_bias,
        alpha,
        limit,
    )
    return out


def linear_int8(
    x_TK: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, scales: torch.Tensor
) -> torch.Tensor:
    """Run `linear` with rows rounded to int8, as in `experts_int8`, and a weight packed by `pack_quads_`."""
    out: torch.Tensor = _ops.linear_int8(x_TK, weight, bias, scales)
    return out


def experts_up(
    x_TM: torch.Tensor, w13: torch.Tensor, topk_weights_TK: torch.Tensor, topk_ids_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run every token through the first half of its experts, with some columns of it: SiLU(gate) * up.

    `w13`: packed [E, 2C, M], the C columns of the gate that belong here above those of up; bf16 or float32. The other
    arguments are those of `experts`. Returns the rows [T * K, C], by expert and then by token, in the number type in
    which `experts` has them between its products, and rows per expert [E].
    """
    out: tuple[torch.Tensor, torch.Tensor] = _ops.experts_up(x_TM, w13, topk_weights_TK, topk_ids_TK)
    return out


def experts_down(
    rows_RI: torch.Tensor, w2: torch.Tensor, topk_weights_TK: torch.Tensor, topk_ids_TK: torch.Tensor
) -> torch.Tensor:
    """Run the rows of `experts_up`, of all columns, through the second half of the experts, and add up each token's.

    `w2`: packed [E, C, I], the C columns of the output that belong here. Returns those columns of the output of
    `experts`, [T, C] in float32, with the same bits.
    """
    out: torch.Tensor = _ops.experts_down(rows_RI, w2, topk_weights_TK, topk_ids_TK)
    return out


def linear(
    x_TK: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows [T, K] times a packed weight [N, K], plus a bias [N]; the result has x's number type.

    A weight of int8 has `scales` [N], float32; one of `pack_fp4_`, `pack_int4_`, `pack_fp8_` or
    `pack_int8_groups_` is as they give it.
    """
    out: torch.Tensor = _ops.linear(x_TK, weight, bias, scales)
    return out


def gated(
    x_TM: torch.Tensor, w13: torch.Tensor, first: int, last: int, *, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """SiLU(gate) * up of rows [T, M] for channels [first, last) of the I of w13: the rows of an expert's down product.

    `w13`: [2I, M], of which the gate half and the up half are packed each by itself; of int8 it has `scales` [2I].
    `first` begins a panel; `last` ends one, or is I. The result is bfloat16, or float32 where rows meet the weight in
    float32. `linear` of all channels and the down weight has the bits of `experts`.
    """
    out: torch.Tensor = _ops.gated(x_TM, w13, first, last, scales)
    return out


def rms_norm(
    x_TM: torch.Tensor, residual_TM: torch.Tensor | None, weight_M: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h = x (+ residual); returns (h / sqrt(mean(h^2) + eps) * weight, h), the latter None without a residual."""
    out_TM, summed_TM = _ops.rms_norm(x_TM, residual_TM, weight_M, eps)
    return out_TM, None if residual_TM is None else summed_TM


def add_rms_norm_(x_TM: torch.Tensor, residual_TM: torch.Tensor, weight_M: torch.Tensor, eps: float) -> None:
    """The same in place: the residual becomes h = x + residual, and x its norm."""
    _ops.add_rms_norm_(x_TM, residual_TM, weight_M, eps)


def rotary(x_T: torch.Tensor, positions_T: torch.Tensor, cos_sin: torch.Tensor, *, head_dim: int, neox: bool) -> None:
    """Rotate every head of x [T, heads * head_dim] in place; `cos_sin`: [positions, rotary_dim], cosines first."""
    _ops.rotary(x_T, positions_T, cos_sin, head_dim, neox)


def qk_norm_rope(
    qkv_T: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    eps: float,
    positions_T: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    q_heads: int,
    k_heads: int,
    neox: bool,
) -> None:
    """Norm and rotate every query and key head of rows [T, (q_heads + k_heads) * D and more] in place.

    The same bits as `rms_norm` of each head and `rotary` after it.
    """
    _ops.qk_norm_rope(qkv_T, q_weight_D, k_weight_D, eps, positions_T, cos_sin, q_heads, k_heads, neox)


PANEL = 32
"""Columns of a packed panel: of a weight, outputs; of a page's keys, tokens; of its values, channels."""


def attention(
    q_TD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    table_starts: torch.Tensor,
    tables: torch.Tensor,
    page_size: int,
    head_dim: int,
    scaling: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of pieces of sequences over pages; returns [T, query heads * head_dim].

    Piece i is rows [starts[i], starts[i + 1]) of q: the last tokens of a sequence of lengths[i] tokens, which lie in
    the pages tables[table_starts[i]] and on. `k_pages`: [pages, KV heads, ...] of which the rest is a packed matrix
    [page_size, head_dim]; `v_pages` likewise, [head_dim, page_size]. Both may be some heads of wider pages. A row's
    result depends on its sequence alone. A row sees the last `window` tokens up to its own, or all with 0. `sinks`
    [query heads], float32: a score beside those of the tokens, whose weight goes to no value.
    """
    out: torch.Tensor = _ops.attention(
        q_TD, k_pages, v_pages, starts, lengths, table_starts, tables, page_size, head_dim, scaling, window, sinks
    )
    return out


def write_pages(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots_N: torch.Tensor,
    keys_NHD: torch.Tensor,
    values_NHD: torch.Tensor,
) -> None:
    """Write keys and values at slots (page * page size + offset) of the pages that `attention` reads.

    `k_pages`: [pages, KV heads, page / W, D / C, W, C] and `v_pages`: [pages, KV heads, D / W, page / C, W, C], with
    panels of W columns and C = 2 for bf16, 1 for f32. Rows of keys and values may lie apart (stride(0) > H * D).
    """
    _ops.write_pages(k_pages, v_pages, slots_N, keys_NHD, values_NHD)


def write_rows(table_PD: torch.Tensor, slots_N: torch.Tensor, rows_ND: torch.Tensor) -> None:
    """Write rows, which may lie apart, to rows of a table by their numbers, int64."""
    _ops.write_rows(table_PD, slots_N, rows_ND)


def exchange_dispatch(
    regions: list[torch.Tensor],
    rank: int,
    x_TM: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    *,
    num_experts: int,
    spin_us: float,
    timeout_s: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Give this rank's tokens to all ranks and take the rows that its experts must compute: x [R, M], ids and weights.

    `regions`: the ranks' shared memory, uint8, zero at first, all mapped in every rank. ids: int32. What is returned
    lies in this rank's region. Last come the seconds waited for other ranks. Raises ValueError for ids out of range,
    before the others can see anything of it, and on all ranks where their formats differ.
    """
    x_RM, ids_RK, weights_RK, waited_ns = _ops.exchange_dispatch(
        regions, rank, x_TM, topk_ids_TK, topk_weights_TK, num_experts, spin_us, timeout_s
    )
    return x_RM, ids_RK, weights_RK, waited_ns * 1e-9


def exchange_combine(
    regions: list[torch.Tensor],
    rank: int,
    sums_RM: torch.Tensor,
    *,
    num_tokens: int,
    spin_us: float,
    timeout_s: float,
) -> tuple[torch.Tensor, float]:
    """Give this rank's f32 sums to all ranks and add up those of its own tokens; returns [T, M] and seconds waited.

    To be called after `exchange_dispatch`. The ranks' sums are added in the order of a binary tree over ranks.
    """
    out_TM, waited_ns = _ops.exchange_combine(regions, rank, sums_RM, num_tokens, spin_us, timeout_s)
    return out_TM, waited_ns * 1e-9


def gather(
    regions: list[torch.Tensor], rank: int, own: torch.Tensor, *, spin_us: float, timeout_s: float
) -> tuple[torch.Tensor, float]:
    """All ranks' `own` values, int64 [up to 16], as [ranks, values], and the seconds waited for them."""
    all_values, waited_ns = _ops.gather(regions, rank, own, spin_us, timeout_s)
    return all_values, waited_ns * 1e-9


def gather_columns(
    regions: list[torch.Tensor],
    rank: int,
    own_TN: torch.Tensor,
    widths: list[int],
    *,
    spin_us: float,
    timeout_s: float,
) -> tuple[torch.Tensor, float]:
    """All ranks' columns side by side, [T, sum of widths], and the seconds waited for them.

    `regions` as in `exchange_dispatch`, which nothing but this uses. Rank r gives widths[r] columns. Rows of `own_TN`
    may lie apart. Raises ValueError, on all ranks, where their rows or widths differ.
    """
    out_TN, waited_ns = _ops.gather_columns(regions, rank, own_TN, widths, spin_us, timeout_s)
    return out_TN, waited_ns * 1e-9


def latent_attention(
    q_TD: torch.Tensor,
    pages: torch.Tensor,
    *,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    table_starts: torch.Tensor,
    tables: torch.Tensor,
    value_dim: int,
    scaling: float,
) -> torch.Tensor:
    """Causal attention over rows that all heads share; returns [T, heads * value_dim].

    `pages`: [pages, page_size, row], token after token; keys are rows, values their first `value_dim` numbers. q holds
    a row for each head, [T, heads * row]. Pieces are as in `attention`. A row's result depends on its sequence alone,
    not on the size of its pages.
    """
    out: torch.Tensor = _ops.latent_attention(q_TD, pages, starts, lengths, table_starts, tables, value_dim, scaling)
    return out


def linear_by_head(x_THK: torch.Tensor, weight_HNK: torch.Tensor, out_THN: torch.Tensor) -> None:
    """Write rows of each head times the head's packed weight to `out_THN`; x and out may be parts of wider rows."""
    _ops.linear_by_head(x_THK, weight_HNK, out_THN)


def topk(
    logits_TE: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
    scoring: str = "softmax",
    bias_E: torch.Tensor | None = None,
    groups: int = 1,
    kept_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best experts of each row, best first: weights, f32, and ids, int32, [T, K] both.

    Weights are scores by `scoring`, "softmax" or "sigmoid", divided by their sum where `renormalize`. A row chooses
    among the experts of its `kept_groups` best of `groups` groups. Logits rank; with a bias, bf16 or f32, scores plus
    bias do. A group ranks by its best expert, with a bias by the sum of its two best. Equal ranks go to the lowest id.
    NaN ranks highest and gives weights of NaN. A row's result depends on that row alone.
    """
    assert scoring in ("softmax", "sigmoid"), f"{scoring!r} is neither softmax nor sigmoid"
    out: tuple[torch.Tensor, torch.Tensor] = _ops.topk(
        logits_TE, top_k, scoring == "sigmoid", renormalize, bias_E, groups, kept_groups
    )
    return out


def record_begin(rows: int) -> None:
    """Record this thread's calls of experts, linear layers, norms, rotations, `topk`, attention, and writes to pages.

    And of the row operators, of `gather_columns` and the operators of shared passes, and of `exchange_dispatch` and
    `exchange_combine`, with nothing but experts between them. All others must be of `rows` rows each; those of
    attention have one row a piece, and `gather_columns` may have some for each row. Other operators are not recorded.
    """
    _ops.record_begin(rows)


def record_end(*, keep: bool) -> int | None:
    """End it. The record's number, or None if it is not kept: not wanted, or with calls of other numbers of rows."""
    number: int = _ops.record_end(keep)
    return number if number >= 0 else None


def record_names(number: int) -> list[str]:
    """The operators that a record calls, in order."""
    names: list[str] = _ops.record_names(number)
    return names


def record_run(number: int, rows: int) -> tuple[list[float], float]:
    """Make the calls of a record again, on what their tensors hold by now, with their first `rows` rows.

    Returns the seconds that each call took, and those waited for other ranks.
    """
    seconds, waited_ns = _ops.record_run(number, rows)
    return seconds, waited_ns * 1e-9


def record_drop(number: int) -> None:
    """Free a record. It has kept its calls' tensors, so that they have their memory for themselves."""
    _ops.record_drop(number)
