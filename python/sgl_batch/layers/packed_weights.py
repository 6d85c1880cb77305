"""Owns the weights of a model in the native kernels' packed form, and computes with them.

Code that writes to a packed weight must do so inside `plain()`. In a pass that ranks share, each computes some columns
of a product (`split`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import torch

from sgl_batch.distributed.shared_arena import SharedArena, padded
from sgl_batch.layers import cpu_gemm
from sgl_batch.layers.column_split import ColumnSplit, PassSplit
from sgl_batch.layers.moe import cpu_experts
from sgl_batch.layers.moe.clamped_experts import ClampedExperts, alternating, in_halves
from sgl_batch.layers.moe.packed_experts import biases_of, packed_experts
from sgl_batch.layers.packed_forms import Form, Packed
from sgl_batch.layers.shared_forms import SharedForms, SmallForm
from sgl_batch.layers.small_weights import (
    GROUPED_FORMS,
    GroupedForm,
    from_int8,
    int8_room,
    most_grouped_bytes,
    new_tensor,
)
from sgl_batch.memory.free_memory import give_back

PANEL = 32
"""Columns of a panel of a packed weight; the last panel has the remaining ones (sgl-kernel/csrc/cpu/gemm.h)."""


class PackedWeights:
    """Weights that are packed in place, without more memory: a packed tensor keeps its shape, not its order.

    `kernels`: the module `sgl_batch_kernel`, or None if it is not installed; then nothing is packed, and torch
    operators compute everything. `int8`: round weights to int8, which halves or quarters their memory, except weights
    that are added as `exact`. A rounded tensor changes its number type. `int8_rows`: also round the rows that meet
    rounded weights, so that products are of int8 with int8. `coded`: code experts' weights of bf16, of which
    products then read 12 bits each, without loss. `grouped`: keep weights of bf16 whose numbers are all those of mxfp4,
    or integers of 4 or 8 bits or numbers of fp8 times scales of groups, in little more than 4 or 8 bits, without loss,
    except weights that are added as `exact`.
    """

    def __init__(
        self,
        kernels: ModuleType | None,
        *,
        int8: bool = False,
        int8_rows: bool = False,
        coded: bool = False,
        grouped: bool = False,
    ) -> None:
        assert int8 or not int8_rows, "int8 rows meet int8 weights"
        assert not (int8 and (coded or grouped)), "int8 weights have no codes"
        self._kernels = kernels
        self._int8, self._int8_rows, self._coded, self._grouped = int8, int8_rows, coded, grouped
        self._packed: dict[int, Packed] = {}
        self._arena: SharedArena | None = None
        self._shared_forms: SharedForms | None = None
        self._biases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._ones, self._zeros = torch.ones(0, 1), torch.zeros(0, 1, dtype=torch.int32)
        self.split = PassSplit()
        self.version = 0
        """Changes whenever packed weights may have changed."""

    def share(self, arena: SharedArena) -> None:
        """Pack weights that lie in an arena together with the ranks that share it, each some of them.

        All ranks then add the same weights in the same order, `settle` their forms, and seal the arena. Before weights
        may be written, this rank takes a copy of them all.
        """
        self._arena, self._shared_forms = arena, SharedForms(arena)

    def small_bytes(self, weight: torch.Tensor) -> int:
        """Return the room in an arena for the smaller form that a weight [out, in] in it may take."""
        if self._int8:
            return padded(weight.numel()) + padded(len(weight) * torch.float32.itemsize)
        may_be_grouped = self._grouped and weight.dtype == torch.bfloat16
        return padded(most_grouped_bytes(weight.numel())) + padded(1) if may_be_grouped else 0

    def settle(self) -> None:
        """Learn the forms of the weights that ranks share. Each calls it when all are added, with the arena open."""
        if self._shared_forms is not None:
            self._shared_forms.settle()
            self._packed = {packed.weight.data_ptr(): packed for packed in self._packed.values()}

    def add_linear(self, weight: torch.Tensor, *, exact: bool = False) -> bool:
        """Pack a weight [out, in]; return False if the kernels cannot take it."""
        return self._pack([(weight, (1, *weight.shape))], exact=exact)

    def add_experts(self, w13: torch.Tensor, w2: torch.Tensor, *, clamped: bool = False) -> bool:
        """Pack the experts' weights [E, 2I, M], its gate and up halves apart, and [E, M, I]; return False likewise.

        The weights of a single expert may be [2I, M] and [M, I]. `clamped`: rows of w13 alternate, as in
        ClampedExperts.
        """
        reordered = w13 if clamped else None
        # A single expert is an MLP, which has all rows of a pass.
        return self._pack(_expert_matrices(w13, w2), reordered=reordered, experts=w13.dim() == 3)

    def add_packed_experts(
        self,
        w13: torch.Tensor,
        w2: torch.Tensor,
        form: GroupedForm,
        data: tuple[torch.Tensor, torch.Tensor],
        *,
        clamped: bool = False,
    ) -> None:
        """Give experts' weights, of which only the shape counts, their `data` in this form: see `add_experts`."""
        alike: list[Packed] = []
        for (weight, shape), packed in zip(_expert_matrices(w13, w2), data, strict=True):
            outputs, inputs = shape[1:]
            alike.append(
                Packed(
                    weight=weight,
                    shape=(weight.shape[:-1].numel() // outputs, outputs, inputs),
                    dtype=weight.dtype,
                    form=Form.PLAIN,
                    may_be_grouped=True,
                    alike=alike,
                    grouped=form,
                    reordered=clamped and weight is w13,
                )
            )
            weight.data = packed
            self._packed[weight.data_ptr()] = alike[-1]

    def add_by_head(self, weight_HNK: torch.Tensor) -> bool:
        """Pack a weight [out, in] for each head; return False likewise. These weights are never rounded."""
        return self._pack([(weight_HNK, tuple(weight_HNK.shape))], exact=True)

    def _pack(
        self,
        weights: Sequence[tuple[torch.Tensor, tuple[int, ...]]],
        *,
        exact: bool = False,
        reordered: torch.Tensor | None = None,
        experts: bool = False,
    ) -> bool:
        if self._kernels is None or not all(_packable(weight) for weight, _ in weights):
            return False
        alike: list[Packed] = []
        # Those of which ranks share but some have no form that all ranks would know.
        are_alike = len({self._is_shared(weight) for weight, _ in weights}) == 1
        tries_groups = self._grouped and not exact and are_alike
        for weight, shape in weights:
            assert weight not in self, "a weight is packed once"
            batches, outputs, inputs = weight.data.view(shape).shape
            is_bf16 = weight.dtype == torch.bfloat16
            form = Form.PLAIN
            if self._int8 and not exact and (self._int8_rows or inputs % 2 == 0):
                form = Form.INT8
            elif is_bf16 and self._coded and experts:
                form = Form.CODED
            alike.append(
                Packed(
                    weight=weight,
                    shape=(batches, outputs, inputs),
                    dtype=weight.dtype,
                    form=form,
                    may_be_grouped=tries_groups and is_bf16 and outputs % PANEL == inputs % PANEL == 0,
                    alike=alike,
                    reordered=weight is reordered,
                )
            )
        self._put(alike)
        return True

    def _is_shared(self, weight: torch.Tensor) -> bool:
        return self._arena is not None and weight in self._arena

    def _put(self, alike: list[Packed]) -> None:
        for packed in alike:
            if packed.reordered:
                _reorder(packed.weight.data, in_halves)
        if self._shared_forms is not None and all(one.may_be_grouped and self._is_shared(one.weight) for one in alike):
            self._put_shared(alike, self._shared_forms)
            return
        small = self._in_groups(alike)
        for index, packed in enumerate(alike):
            if small is None:
                self._put_alone(packed)
            else:
                packed.grouped, made = small
                packed.weight.data = made[index].view(*packed.weight.shape[:-1], -1)
            self._packed[packed.weight.data_ptr()] = packed

    def _put_shared(self, alike: list[Packed], forms: SharedForms) -> None:
        """Pack weights for all ranks if it is this one's turn. The others learn their form when all are packed."""
        assert self._kernels is not None, "without kernels nothing is packed"
        is_ours = forms.takes(alike)
        small = self._in_groups(alike) if is_ours else None
        for packed in alike:
            if is_ours and small is None:
                self._kernels.pack_(packed.matrices)
            self._packed[packed.weight.data_ptr()] = packed
        forms.add(alike, small, is_ours=is_ours)

    def _in_groups(self, alike: list[Packed]) -> SmallForm | None:
        """Return the first grouped form that all of the weights have, and their data in it; None if there is none."""
        assert self._kernels is not None, "without kernels nothing is packed"
        if not all(packed.may_be_grouped for packed in alike):
            return None
        # Most weights of other numbers differ in the first panel.
        panels = [packed.matrices[:1, :PANEL] for packed in alike]
        for form in GROUPED_FORMS:
            fit = all(packed.shape[2] % form.bits.group == 0 for packed in alike)
            if not fit or not all(form.pack(self._kernels, panel, form.room(panel.shape)) for panel in panels):
                continue
            made: list[torch.Tensor] = []
            for packed in alike:
                made.append(form.room(packed.matrices.shape))
                if not form.pack(self._kernels, packed.matrices, made[-1]):
                    break
            else:
                return form, made
        return None

    def _put_alone(self, packed: Packed) -> None:
        assert self._kernels is not None, "without kernels nothing is packed"
        arena = self._arena if self._is_shared(packed.weight) else None
        coded = packed.form is Form.CODED
        assert arena is None or not coded, "each rank codes its own experts"
        is_ours = arena is None or arena.takes(packed.weight.nbytes)
        if packed.form is Form.INT8:
            exact = packed.matrices
            rounded, packed.scales = int8_room(exact.shape, new_tensor if arena is None else arena.empty)
            if is_ours:
                self._kernels.round_to_int8_(exact, rounded, packed.scales)
            if is_ours and arena is not None:
                arena.release(exact)
            packed.weight.data = rounded.view(packed.weight.shape)
            packed.in_quads = self._int8_rows
        if coded:
            packed.marks = self._kernels.pack_coded_(packed.matrices)
        elif is_ours:
            pack = self._kernels.pack_quads_ if packed.in_quads else self._kernels.pack_
            pack(packed.matrices)

    def _take(self, packed: Packed) -> None:
        assert self._kernels is not None, "without kernels nothing is packed"
        del self._packed[packed.weight.data_ptr()]
        if packed.grouped is not None:
            before = packed.weight.data
            plain = packed.grouped.unpack(self._kernels, packed.matrices, packed.shape[2])
            packed.weight.data, packed.grouped = plain.view(*packed.weight.shape[:-1], -1), None
            give_back(before)  # its memory may be a part of what other layers have
        else:
            self._take_alone(packed)
        if packed.reordered:
            _reorder(packed.weight.data, alternating)

    def _take_alone(self, packed: Packed) -> None:
        assert self._kernels is not None, "without kernels nothing is packed"
        if packed.marks is not None:
            self._kernels.uncode_(packed.matrices, packed.marks)
            packed.marks = None
        unpack = self._kernels.unpack_quads_ if packed.in_quads else self._kernels.unpack_
        unpack(packed.matrices)
        if packed.scales is not None:
            packed.weight.data = from_int8(packed.matrices, packed.scales, packed.dtype).view(packed.weight.shape)
            packed.scales = None

    def __len__(self) -> int:
        return len(self._packed)

    def __contains__(self, weight: torch.Tensor) -> bool:
        """Return whether a weight begins where a packed weight begins."""
        return weight.data_ptr() in self._packed

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Inside, all weights are in their plain order and number type; afterwards they are packed again.

        A rounded weight that is not written to rounds to the same values again.
        """
        if self._arena is not None:
            self._arena.make_own()
            self._arena = self._shared_forms = None
        everything = list(self._packed.values())
        for packed in everything:
            self._take(packed)
        try:
            yield
        finally:
            for packed in everything:
                if packed is packed.alike[0]:
                    self._put(packed.alike)
            self._biases.clear()
            self.version += 1

    def matrices_of(self, experts: torch.Tensor) -> torch.Tensor:
        """Return the packed matrices of experts' weights as they lie: [E, 2, I, M] of w13, [E, 1, M, I] of w2."""
        matrices = self._packed[experts.data_ptr()].matrices
        return matrices.view(len(experts), -1, *matrices.shape[1:])

    def is_plain_number(self, experts: torch.Tensor) -> bool:
        """Return whether packed weights of experts are neither rounded nor coded nor those of clamped ones."""
        packed = self._packed[experts.data_ptr()]
        return packed.scales is None and packed.marks is None and packed.grouped is None and not packed.reordered

    @property
    def has_codes(self) -> bool:
        """Whether any weight is coded."""
        return any(packed.marks is not None for packed in self._packed.values())

    def _scales(self, weight: torch.Tensor) -> torch.Tensor | None:
        return self._packed[weight.data_ptr()].scales

    def _marks(self, weight: torch.Tensor) -> torch.Tensor | None:
        return self._packed[weight.data_ptr()].marks

    def _rounds_rows(self, weight: torch.Tensor) -> bool:
        return self._packed[weight.data_ptr()].in_quads

    def _product_with(self, weight: torch.Tensor) -> Callable[..., torch.Tensor]:
        """Return the kernel that multiplies rows by a packed weight or by whole panels of it."""
        assert self._kernels is not None, "without kernels nothing is packed"
        kernel: Callable[..., torch.Tensor]
        kernel = self._kernels.linear_int8 if self._rounds_rows(weight) else self._kernels.linear
        return kernel

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply rows [..., in] by a weight [out, in], plus a bias [out]; the result has x's number type."""
        if self._kernels is None or weight not in self:
            return cpu_gemm.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        split = self._split_of(weight)
        if split is not None:
            out = self._shared_linear(split, rows, weight, bias)
        else:
            out = self._product_with(weight)(rows, weight, bias, scales=self._scales(weight))
        return out.view(*x.shape[:-1], len(weight))

    def _split_of(self, *weights: torch.Tensor) -> ColumnSplit | None:
        """Return the split of products with these packed weights [out, in]; None if this rank computes them whole."""
        split = self.split.current
        if split is None:
            return None
        units = min(-(-len(weight) // PANEL) for weight in weights)
        return split if split.pays(sum(weight.nbytes for weight in weights), units) else None

    def _shared_linear(
        self, split: ColumnSplit, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        product, scales = self._product_with(weight), self._scales(weight)

        def columns(first: int, last: int) -> torch.Tensor:
            own_bias = None if bias is None else bias[first:last]
            own_scales = None if scales is None else scales.view(-1)[first:last]
            return product(rows, weight[first:last], own_bias, scales=own_scales)

        return split.columns(len(weight), PANEL, columns)

    def rows(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return rows [..., in] of a weight [out, in] by their indices. The weight must not be rounded."""
        if weight not in self:
            return torch.nn.functional.embedding(ids, weight)
        assert self._scales(weight) is None, "an embedding is not rounded"
        return _rows_of(weight.data, ids)

    def by_head(self, x_THK: torch.Tensor, weight_HNK: torch.Tensor, *, out_THN: torch.Tensor) -> None:
        """Multiply the rows of each head by its weight, into `out_THN`; both may be parts of wider rows.

        In a pass that ranks share, a rank writes its own heads only; `all_heads` brings them together.
        """
        if self._kernels is None or weight_HNK not in self:
            out_THN.copy_(torch.bmm(x_THK.transpose(0, 1), weight_HNK.transpose(1, 2)).transpose(0, 1))
            return
        split, heads = self.split.current, slice(None)
        if split is not None:
            heads = slice(*split.own(len(weight_HNK)))
        if len(weight_HNK[heads]):
            self._kernels.linear_by_head(x_THK[:, heads], weight_HNK[heads], out_THN[:, heads])

    def all_heads(self, x_THN: torch.Tensor) -> torch.Tensor:
        """Return rows [T, H * N] of all heads, of which this rank has at least its own."""
        split, (_, heads, width) = self.split.current, x_THN.shape
        rows = x_THN.flatten(1)
        if split is None:
            return rows
        return split.columns(heads * width, width, lambda first, last: rows[:, first:last])

    def experts(
        self,
        x_TM: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        *,
        f32_output: bool = False,
        clamped: ClampedExperts | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute experts from their packed weights, or with torch if they are not packed: an `ExpertRunner`."""
        if self._kernels is None or w13 not in self:
            return cpu_experts.combined_experts(
                x_TM, w13, w2, topk_weights_TK, topk_ids_TK, f32_output=f32_output, clamped=clamped
            )
        return packed_experts(
            self._kernels,
            x_TM,
            w13,
            w2,
            topk_weights_TK,
            topk_ids_TK,
            f32_output=f32_output,
            w13_scales=self._scales(w13),
            w2_scales=self._scales(w2),
            int8_rows=self._rounds_rows(w13),
            marks=(self._marks(w13), self._marks(w2)),
            clamped=clamped,
            biases=None if clamped is None else self._biases_of(clamped),
        )

    def _biases_of(self, clamped: ClampedExperts) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the biases as the kernels take them, the same memory again and again."""
        key = clamped.w13_bias.data_ptr()
        if key not in self._biases:
            self._biases[key] = biases_of(clamped)
        return self._biases[key]

    def mlp(self, x_TM: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """Compute an MLP with weights [2I, M] and [M, I] for every row [T, M] in one call, as a single expert.

        Where int8 rows meet them, each rank of a pass that ranks share computes it whole.
        """
        split = None
        if self._kernels is not None and gate_up in self and not self._rounds_rows(gate_up):
            gate, up = gate_up.chunk(2)
            split = self._split_of(gate, up, down)
        if split is not None:
            return self._shared_mlp(split, x_TM, gate_up, down)
        return self.experts(x_TM, gate_up[None], down[None], *self._only_choice(len(x_TM)))[0]

    def _only_choice(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and ids [rows, 1] that choose the first expert alone, the same memory again and again."""
        if rows > len(self._ones):
            self._ones, self._zeros = torch.ones(rows, 1), torch.zeros(rows, 1, dtype=torch.int32)
        return self._ones[:rows], self._zeros[:rows]

    def _shared_mlp(
        self, split: ColumnSplit, x_TM: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        """Share the intermediate channels, and then the outputs; the result has the bits of a single expert."""
        assert self._kernels is not None, "without kernels nothing is packed"
        kernels, rows, scales = self._kernels, x_TM.contiguous(), self._scales(gate_up)
        flat_scales = None if scales is None else scales.view(-1)

        def channels(first: int, last: int) -> torch.Tensor:
            part: torch.Tensor = kernels.gated(rows, gate_up, first, last, scales=flat_scales)
            return part

        gated_TI = split.columns(len(gate_up) // 2, PANEL, channels)
        # The product is rounded once, to the number type of the rows.
        exact = gated_TI.to(torch.promote_types(gated_TI.dtype, x_TM.dtype))
        return self._shared_linear(split, exact, down, None).to(x_TM.dtype)


def _expert_matrices(w13: torch.Tensor, w2: torch.Tensor) -> list[tuple[torch.Tensor, tuple[int, int, int]]]:
    """Return experts' weights, each with the shape of its matrices."""
    hidden, inter = w2.shape[-2:]
    return [(w13, (-1, inter, hidden)), (w2, (-1, hidden, inter))]


def _rows_of(weight_NK: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return rows [..., K] of a packed weight of bf16 or float32, which has the shape of the plain one."""
    outputs, inputs = weight_NK.shape
    pair = 2 if weight_NK.dtype == torch.bfloat16 else 1
    flat, numbers = weight_NK.reshape(-1), ids.reshape(-1)
    whole = outputs // PANEL * PANEL
    found = weight_NK.new_empty(len(numbers), inputs // pair, pair)
    for first, last, width in ((0, whole, PANEL), (whole, outputs, outputs - whole)):
        here = (numbers >= first) & (numbers < last)
        if width and bool(here.any()):
            panels = flat[first * inputs : last * inputs].view(-1, inputs // pair, width, pair)
            own = numbers[here] - first
            found[here] = panels[own // width, :, own % width]
    return found.view(*ids.shape, inputs)


def _reorder(weight: torch.Tensor, order: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put the rows of each expert in another order, in place, one expert after the other to take little memory."""
    for expert in weight.view(-1, *weight.shape[-2:]):
        expert.copy_(order(expert[None])[0])


def _packable(weight: torch.Tensor) -> bool:
    """Return whether the kernels take a weight: bf16 in pairs along the inputs, or float32, contiguous, on a CPU."""
    in_pairs = weight.dtype == torch.bfloat16 and weight.shape[-1] % 2 == 0
    return (in_pairs or weight.dtype == torch.float32) and weight.is_contiguous() and weight.device.type == "cpu"
