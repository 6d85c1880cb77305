"""Owns the Triton kernels of expert compute over `RoutedRows`, which `triton_steps` calls. Not yet run on a GPU.

No kernel uses atomic additions. Shape suffixes: H a block of rows, N a block of columns, D a step of the inner
dimension, C the choices of a token, rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_up_kernel(
    x, w13, inter, cell_row, block_expert, x_stride, top_k, hidden, width, experts, bias, alpha, limit,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, CLAMPED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Gather x[t] and compute inter[s] = silu(gate(x[t])) * up(x[t]) for the cells s of a block, in some columns.

    CLAMPED: the activation of clamped_experts; rows of gate and up alternate.
    """
    expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
    if expert < experts:
        cell_H = (tl.program_id(0) * H + tl.arange(0, H)).to(tl.int64)
        row_H = tl.load(cell_row + cell_H)
        used_H = row_H >= 0
        x_H = x + (row_H // top_k).to(tl.int64) * x_stride
        column_N = tl.program_id(1) * N + tl.arange(0, N)
        if CLAMPED:
            gate_row_N = expert * 2 * width + 2 * column_N
            up_row_N = gate_row_N + 1
        else:
            gate_row_N = expert * 2 * width + column_N
            up_row_N = gate_row_N + width
        gate_N = w13 + gate_row_N * hidden
        up_N = w13 + up_row_N * hidden
        gate_HN = tl.zeros((H, N), dtype=tl.float32)
        up_HN = tl.zeros((H, N), dtype=tl.float32)
        for start in range(0, hidden, D):
            inner_D = start + tl.arange(0, D)
            in_w_DN = (inner_D < hidden)[:, None] & (column_N < width)[None, :]
            x_HD = tl.load(x_H[:, None] + inner_D[None, :], used_H[:, None] & (inner_D < hidden)[None, :], other=0.0)
            gate_DN = tl.load(gate_N[None, :] + inner_D[:, None], in_w_DN, other=0.0)
            up_DN = tl.load(up_N[None, :] + inner_D[:, None], in_w_DN, other=0.0)
            if WIDEN:
                x_HD, gate_DN, up_DN = x_HD.to(tl.float32), gate_DN.to(tl.float32), up_DN.to(tl.float32)
            gate_HN = tl.dot(x_HD, gate_DN, gate_HN, input_precision="ieee")
            up_HN = tl.dot(x_HD, up_DN, up_HN, input_precision="ieee")
        if CLAMPED:
            gate_HN += tl.load(bias + gate_row_N, column_N < width, other=0.0)[None, :]
            up_HN += tl.load(bias + up_row_N, column_N < width, other=0.0)[None, :]
            gate_HN = tl.where(gate_HN > limit, limit, gate_HN)
            up_HN = tl.where(up_HN > limit, limit, tl.where(up_HN < -limit, -limit, up_HN)) + 1.0
            mixed_HN = gate_HN / (1.0 + tl.exp(-alpha * gate_HN)) * up_HN
        else:
            mixed_HN = gate_HN / (1.0 + tl.exp(-gate_HN)) * up_HN
        to_HN = inter + cell_H[:, None] * width + column_N[None, :]
        tl.store(to_HN, mixed_HN.to(inter.dtype.element_ty), used_H[:, None] & (column_N < width)[None, :])


@triton.jit
def down_kernel(
    inter, w2, weights, products, cell_row, block_expert, hidden, width, experts, bias,
    H: tl.constexpr, N: tl.constexpr, D: tl.constexpr, BIASED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute and scatter products[r] = weight[r] * down(inter[s]) for the cells s of a block, in some columns."""
    expert = tl.load(block_expert + tl.program_id(0)).to(tl.int64)
    if expert < experts:
        cell_H = (tl.program_id(0) * H + tl.arange(0, H)).to(tl.int64)
        row_H = tl.load(cell_row + cell_H).to(tl.int64)
        used_H = row_H >= 0
        inter_H = inter + cell_H * width
        column_N = tl.program_id(1) * N + tl.arange(0, N)
        w2_N = w2 + (expert * hidden + column_N) * width
        sum_HN = tl.zeros((H, N), dtype=tl.float32)
        for start in range(0, width, D):
            inner_D = start + tl.arange(0, D)
            in_w_DN = (inner_D < width)[:, None] & (column_N < hidden)[None, :]
            inter_HD = tl.load(
                inter_H[:, None] + inner_D[None, :], used_H[:, None] & (inner_D < width)[None, :], other=0.0
            )
            w2_DN = tl.load(w2_N[None, :] + inner_D[:, None], in_w_DN, other=0.0)
            if WIDEN:
                inter_HD, w2_DN = inter_HD.to(tl.float32), w2_DN.to(tl.float32)
            sum_HN = tl.dot(inter_HD, w2_DN, sum_HN, input_precision="ieee")
        if BIASED:
            sum_HN += tl.load(bias + expert * hidden + column_N, column_N < hidden, other=0.0)[None, :]
        weight_H = tl.load(weights + row_H, used_H, other=0.0)
        to_HN = products + row_H[:, None] * hidden + column_N[None, :]
        tl.store(to_HN, sum_HN * weight_H[:, None], used_H[:, None] & (column_N < hidden)[None, :])


@triton.jit
def gather_kernel(
    x, out, cell_row, block_expert, block_rows, x_stride, top_k, hidden, experts, H: tl.constexpr, N: tl.constexpr
):
    """Write out[s] = x[t] for a cell with a row of token t, else 0; idle blocks stay as they are."""
    cell_H = (tl.program_id(0) * H + tl.arange(0, H)).to(tl.int64)
    if tl.load(block_expert + tl.program_id(0) * H // block_rows) < experts:
        row_H = tl.load(cell_row + cell_H)
        column_N = tl.program_id(1) * N + tl.arange(0, N)
        from_HN = x + ((row_H // top_k).to(tl.int64) * x_stride)[:, None] + column_N[None, :]
        x_HN = tl.load(from_HN, (row_H >= 0)[:, None] & (column_N < hidden)[None, :], other=0.0)
        tl.store(out + cell_H[:, None] * hidden + column_N[None, :], x_HN, (column_N < hidden)[None, :])


@triton.jit
def scatter_kernel(
    outputs, weights, products, cell_row, block_expert, block_rows, hidden, experts, H: tl.constexpr, N: tl.constexpr
):
    """Write products[r] = weight[r] * outputs[s] for each cell s with a row r."""
    cell_H = (tl.program_id(0) * H + tl.arange(0, H)).to(tl.int64)
    if tl.load(block_expert + tl.program_id(0) * H // block_rows) < experts:
        row_H = tl.load(cell_row + cell_H).to(tl.int64)
        column_N = tl.program_id(1) * N + tl.arange(0, N)
        used_HN = (row_H >= 0)[:, None] & (column_N < hidden)[None, :]
        out_HN = tl.load(outputs + cell_H[:, None] * hidden + column_N[None, :], used_HN, other=0.0).to(tl.float32)
        weight_H = tl.load(weights + row_H, row_H >= 0, other=0.0)
        tl.store(products + row_H[:, None] * hidden + column_N[None, :], out_HN * weight_H[:, None], used_HN)


@triton.jit
def silu_mul_kernel(gate_up, inter, block_expert, block_rows, width, experts, H: tl.constexpr, N: tl.constexpr):
    """Write inter[s] = silu(gate) * up, where gate and up are the halves of a row; idle blocks stay as they are."""
    cell_H = (tl.program_id(0) * H + tl.arange(0, H)).to(tl.int64)
    if tl.load(block_expert + tl.program_id(0) * H // block_rows) < experts:
        column_N = tl.program_id(1) * N + tl.arange(0, N)
        used_HN = (cell_H >= 0)[:, None] & (column_N < width)[None, :]
        gate_HN = gate_up + cell_H[:, None] * 2 * width + column_N[None, :]
        up_HN = tl.load(gate_HN + width, used_HN, other=0.0).to(tl.float32)
        gate_HN = tl.load(gate_HN, used_HN, other=0.0).to(tl.float32)
        mixed_HN = gate_HN / (1.0 + tl.exp(-gate_HN)) * up_HN
        tl.store(inter + cell_H[:, None] * width + column_N[None, :], mixed_HN.to(inter.dtype.element_ty), used_HN)


@triton.jit
def tree_sum_kernel(products, ids, paths, out, top_k, hidden, experts, C: tl.constexpr, N: tl.constexpr):
    """Write out[t] = the sum of token t's rows, in the order of the binary tree that halves [0, E) repeatedly.

    The rows are in the order of their experts. Two neighbours have a gap between them, which is larger the higher the
    tree node at which they part. A gap is closed, by adding the sums on its two sides, at the first row that has a
    larger gap behind it.
    """
    token = tl.program_id(0).to(tl.int64)
    column_N = tl.program_id(1) * N + tl.arange(0, N)
    choice_C = tl.arange(0, C)
    expert_C = tl.load(ids + token * top_k + choice_C, choice_C < top_k, other=experts)
    next_C = tl.load(ids + token * top_k + choice_C + 1, choice_C + 1 < top_k, other=experts)
    path_C = tl.load(paths + expert_C, expert_C < experts, other=0)
    next_path_C = tl.load(paths + next_C, next_C < experts, other=0)
    gap_C = tl.where(next_C < experts, path_C ^ next_path_C, 0x7FFFFFFF)
    later_CC = (choice_C[None, :] > choice_C[:, None]) & (gap_C[None, :] >= gap_C[:, None])
    closed_at_C = tl.min(tl.where(later_CC, choice_C[None, :], C), axis=1)
    merges_C = tl.sum((closed_at_C[:, None] == choice_C[None, :]).to(tl.int32), axis=0)
    stack_CN = tl.zeros((C, N), dtype=tl.float32)
    top = 0
    for choice in range(0, tl.sum((expert_C < experts).to(tl.int32), axis=0)):
        row_N = tl.load(products + (token * top_k + choice) * hidden + column_N, column_N < hidden, other=0.0)
        stack_CN = tl.where(choice_C[:, None] == top, row_N[None, :], stack_CN)
        top += 1
        for _ in range(0, tl.sum(tl.where(choice_C == choice, merges_C, 0), axis=0)):
            top -= 1
            right_N = tl.sum(tl.where(choice_C[:, None] == top, stack_CN, 0.0), axis=0)
            stack_CN = tl.where(choice_C[:, None] == top - 1, stack_CN + right_N[None, :], stack_CN)
    sum_N = tl.sum(tl.where(choice_C[:, None] == 0, stack_CN, 0.0), axis=0)
    tl.store(out + token * hidden + column_N, sum_N.to(out.dtype.element_ty), column_N < hidden)
