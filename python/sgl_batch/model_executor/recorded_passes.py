"""Owns the decode passes that run from a record on a CPU: all native calls of a pass at once, without Python between.

A pass over few rows is some hundred short calls, and Python with cold caches takes longer between two of them than some
of them do. The first pass that has no more rows than the one before is computed as usual, over memory that stays, while
the native library records its calls. Later passes with as many rows or fewer copy their inputs there and make the calls
again: the same kernels over the same weights, with the same bits.

Where ranks exchange rows through memory that they share, the exchange is among the calls, and what comes from other
ranks differs from pass to pass. A pass without rows, in which a rank computes for others alone, has a record of its
own. Passes that all ranks share have the gathers of columns among their calls.

Some of torch's operators on rows lie between the native calls, and are made native calls themselves: their bits stay.
A pass whose layers compute with anything but recordable operators and views is not recorded, and no other is tried.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TypeVar

import numpy as np
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_batch.layers.attention.native_paged import PieceMetadata
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor.group_pass import Part
from sgl_batch.sglang_adapter.forward import decode_batch_over
from sgl_batch.sglang_adapter.types.batches import ForwardBatch
from sgl_batch.sglang_adapter.types.models import AttentionBackend

Compute = Callable[[Sequence[Part], torch.Tensor], torch.Tensor]
"""Computes all layers of a pass: of its one part and its embeddings, the hidden states after the last norm."""

Version = Callable[[PieceMetadata | None], object]
"""Changes whenever weights or KV pages may lie elsewhere, weights may be packed anew, or a pass over these pieces (or
without rows) makes other calls for another reason than its number of rows."""

_Out = TypeVar("_Out")

_RECORDED = frozenset(
    f"sgl_batch_kernel::{name}"
    for name in (
        "add_rms_norm_",
        "add_rows",
        "attention",
        "copy_rows",
        "exchange_combine",
        "exchange_dispatch",
        "experts",
        "experts_down",
        "experts_int8",
        "experts_up",
        "gated",
        "gather_columns",
        "latent_attention",
        "linear",
        "linear_by_head",
        "linear_int8",
        "mul_rows",
        "own_choices",
        "put_rows_",
        "qk_norm_rope",
        "rms_norm",
        "rotary",
        "scale_rows",
        "sigmoid_rows",
        "sum_partials_",
        "topk",
        "write_pages",
        "write_rows",
    )
)
# They give memory that a recorded operator writes, or another shape to what one has written, or compare number types,
# or free an earlier record, whenever Python gets round to it.
_OTHERS = frozenset(
    (
        "aten::_unsafe_view",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::promote_types",
        "sgl_batch_kernel::record_drop",
    )
)

_PARTS = ("attention", "router", "experts", "exchange")
_COUNTED_BY_ROW = ("gathered_bytes",)
_MATRIX = 2

# A record keeps the rows between all calls apart: in each layer about as many numbers as this many hidden states.
# Passes with so many rows that this takes more memory are computed; they hardly notice the time between two calls.
_ROWS_KEPT_A_LAYER = 8
_MOST_BYTES = 256 << 20


class RecordedPasses:
    """The record of one model's decode passes, if there is one, and that of its passes without rows.

    `kernels`: the module `sgl_batch_kernel`. `attn_backend`: the native attention backend, whose metadata are
    `PieceMetadata`. `num_layers`: of the model, by which the memory of a record is estimated. `latent_numbers`: those
    that queries and results over latents have in a row.
    """

    def __init__(
        self,
        kernels: ModuleType,
        *,
        attn_backend: AttentionBackend,
        counters: Counters,
        version: Version,
        num_layers: int,
        latent_numbers: int = 0,
    ) -> None:
        self._kernels, self._attn_backend = kernels, attn_backend
        self._num_layers, self._latent_numbers = num_layers, latent_numbers
        self._counters, self._version = counters, version
        self._record: _Record | None = None
        self._without_rows: _Calls | None = None
        self._seen_version: object = None
        self._last_rows = 0
        self._is_recordable = True

    def run(self, part: Part, hidden: torch.Tensor, compute: Compute) -> torch.Tensor:
        """Compute a decode pass, which has one sub-batch; `hidden`: its embeddings [rows, hidden_size].

        Returns the hidden states after the last norm, which are the caller's.
        """
        sub, rows = part.sub_batches[0], len(hidden)
        pieces = sub.attn_metadata
        if not (isinstance(pieces, PieceMetadata) and _is_as_read(sub.forward_batch)):
            return compute([part], hidden)
        is_first = self._is_first_of_version(pieces)
        grows, self._last_rows = is_first or rows > self._last_rows, rows
        if not self._is_recordable:
            return compute([part], hidden)
        if self._record is not None and self._record.inputs.has_room(rows, pieces):
            return self._again(self._record, sub.forward_batch, pieces, hidden)
        if grows or self._bytes_of_record(hidden) > _MOST_BYTES:
            return compute([part], hidden)
        self._record = None
        return self._computed_and_recorded(part, pieces, hidden, compute)

    def run_without_rows(self, compute: Callable[[], None]) -> None:
        """Take part in a pass of other ranks, with one expert call a layer. `compute` does it by hand."""
        is_first = self._is_first_of_version(None)
        if self._without_rows is not None:
            self._make(self._without_rows, 0)
        elif self._is_recordable and not is_first:
            _, self._without_rows = self._recorded(0, compute)
        else:
            compute()

    def _is_first_of_version(self, pieces: PieceMetadata | None) -> bool:
        """Return whether this is another version than that of the last pass, and drop that one's records if so.

        The first pass over new weights may prepare some of them, which is no part of a pass.
        """
        version = self._version(pieces)
        if version == self._seen_version:
            return False
        self._seen_version, self._record, self._without_rows = version, None, None
        self._is_recordable = True
        return True

    def _bytes_of_record(self, hidden: torch.Tensor) -> int:
        """Return about how many bytes the record of a pass over these rows keeps."""
        rows, width = hidden.shape
        return rows * self._num_layers * (_ROWS_KEPT_A_LAYER * width + self._latent_numbers) * hidden.itemsize

    def _again(self, record: _Record, batch: ForwardBatch, pieces: PieceMetadata, hidden: torch.Tensor) -> torch.Tensor:
        record.inputs.load(batch, pieces, hidden)
        self._make(record.calls, len(hidden))
        return record.out[: len(hidden)].clone()

    def _make(self, calls: _Calls, rows: int) -> None:
        """Make the calls of a record, with its first rows."""
        spent_s, waited_s = self._kernels.record_run(calls.number, rows)
        seconds = np.bincount(calls.part_of_call, spent_s, len(_PARTS))
        for part, spent in zip(_PARTS, seconds.tolist(), strict=True):
            self._counters.clock.spent(spent, part)
        self._counters.clock.shift(waited_s, source="exchange", target="stall")
        for rows_per_expert in calls.rows_per_expert:
            self._counters.add_expert_call(rows_per_expert)
        for name, amount in calls.counts.items():
            self._counters.add(name, amount * rows if name in _COUNTED_BY_ROW else amount)
        self._counters.add("recorded_passes")

    def _computed_and_recorded(
        self, part: Part, pieces: PieceMetadata, hidden: torch.Tensor, compute: Compute
    ) -> torch.Tensor:
        sub = part.sub_batches[0]
        inputs = _Inputs(sub.forward_batch, pieces, hidden)
        batch = inputs.batch(sub.forward_batch)
        own = replace(part, batch=batch, sub_batches=[replace(sub, forward_batch=batch, attn_metadata=inputs.pieces)])
        self._attn_backend.forward_metadata = inputs.pieces
        out, calls = self._recorded(len(hidden), lambda: compute([own], inputs.hidden))
        if calls is not None:
            self._record = _Record(calls, inputs, out)
        return out.clone()

    def _recorded(self, rows: int, compute: Callable[[], _Out]) -> tuple[_Out, _Calls | None]:
        """Compute something over so many rows; return what it gives, and its calls if they can be made again."""
        watch, before = _Watch(self._kernels, rows), dict(self._counters.counts)
        self._kernels.record_begin(rows)
        try:
            with self._counters.counting_later() as rows_per_expert, watch:
                out = compute()
        except BaseException:
            self._kernels.record_end(keep=False)
            raise
        number = self._kernels.record_end(keep=watch.is_recordable)
        self._is_recordable = number is not None
        counts = {name: count - before.get(name, 0) for name, count in self._counters.counts.items()}
        for counted in rows_per_expert:
            self._counters.add_expert_call(counted)
        if number is None:
            return out, None
        self._counters.add("passes_recorded")
        return out, _Calls(self._kernels, number, rows, rows_per_expert, counts)


class _Calls:
    """The native calls of a pass, and the memory in which each expert call counts its rows.

    `counts`: what else the pass counts, by name; of some names for each row.
    """

    def __init__(
        self,
        kernels: ModuleType,
        number: int,
        rows: int,
        rows_per_expert: list[torch.Tensor],
        counts: Mapping[str, int],
    ) -> None:
        self.number, self.rows_per_expert = number, list(rows_per_expert)
        self.counts = {
            name: count // rows if name in _COUNTED_BY_ROW else count for name, count in counts.items() if count
        }
        names = kernels.record_names(number)
        self.part_of_call = np.array([_part_of(names, index) for index in range(len(names))], dtype=np.int64)
        weakref.finalize(self, kernels.record_drop, number)


@dataclass(frozen=True, slots=True)
class _Record:
    """A recorded pass: its calls, its inputs and its output."""

    calls: _Calls
    inputs: _Inputs
    out: torch.Tensor


def _part_of(names: list[str], index: int) -> int:
    """Return which of `_PARTS` a call belongs to.

    The product before a choice of experts is the router, and that behind the first half of an MLP belongs to it.
    """
    following = names[index + 1] if index + 1 < len(names) else ""
    before = next((name for name in reversed(names[:index]) if name not in ("gather_columns", "copy_rows")), "")
    is_second_half = before == "gated" and names[index].startswith("linear")
    if names[index] == "gated" or is_second_half or names[index].startswith("experts"):
        return _PARTS.index("experts")
    if names[index] in ("exchange_dispatch", "exchange_combine", "gather_columns", "sum_partials"):
        return _PARTS.index("exchange")
    return _PARTS.index("router" if "topk" in (names[index], following) else "attention")


class _Inputs:
    """What the layers of a decode pass read that changes from pass to pass, at fixed addresses."""

    def __init__(self, batch: ForwardBatch, pieces: PieceMetadata, hidden: torch.Tensor) -> None:
        rows = len(hidden)
        self.hidden = hidden.clone()
        self.positions, self.kv_indices = batch.positions.clone(), batch.out_cache_loc.clone()
        # Sequences grow by a page now and then.
        tables = pieces.tables.new_zeros(2 * len(pieces.tables) + rows)
        tables[: len(pieces.tables)] = pieces.tables
        self.pieces = PieceMetadata(
            starts=torch.arange(rows + 1),
            lengths=pieces.lengths.clone(),
            table_starts=pieces.table_starts.clone(),
            tables=tables,
            visits=pieces.visits,
        )

    def has_room(self, rows: int, pieces: PieceMetadata) -> bool:
        return rows <= len(self.hidden) and len(pieces.tables) <= len(self.pieces.tables)

    def batch(self, batch: ForwardBatch) -> ForwardBatch:
        """Return a batch like this one, whose layers read this memory."""
        own = {"input_ids": batch.input_ids, "positions": self.positions, "out_cache_loc": self.kv_indices}
        return decode_batch_over(batch, own)

    def load(self, batch: ForwardBatch, pieces: PieceMetadata, hidden: torch.Tensor) -> None:
        rows = len(hidden)
        self.hidden[:rows] = hidden
        self.positions[:rows] = batch.positions
        self.kv_indices[:rows] = batch.out_cache_loc
        self.pieces.lengths[:rows] = pieces.lengths
        self.pieces.table_starts[:rows] = pieces.table_starts
        self.pieces.tables[: len(pieces.tables)] = pieces.tables


def _is_as_read(batch: ForwardBatch) -> bool:
    """Return whether a batch has its positions and KV indices in the form that native calls read as it is."""
    given = (batch.positions, batch.out_cache_loc)
    return all(isinstance(rows, torch.Tensor) and rows.dim() == 1 and rows.dtype == torch.int64 for rows in given)


class _Watch(TorchDispatchMode):
    """Sees every operator of a pass over so many rows, and computes some of torch's by native ones.

    `is_recordable`: whether a record of the native calls has all of the pass.
    """

    def __init__(self, kernels: ModuleType, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_recordable = True
        self._by_rows = _ByRows(kernels, rows)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Collection[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        name = func._schema.name
        if not (name in _RECORDED or name in _OTHERS or func.is_view):
            done = self._by_rows(name, args, kwargs or {})
            if done is not None:
                return done
            self.is_recordable = False
        return func(*args, **(kwargs or {}))


class _ByRows:
    """Computes torch's operators on so many rows by native ones that a record can have."""

    def __init__(self, kernels: ModuleType, rows: int) -> None:
        self._kernels, self._rows = kernels, rows
        self._operators: Mapping[str, Callable[..., torch.Tensor | None]] = {
            "aten::_to_copy": self._copied,
            "aten::add": self._added,
            "aten::clone": self._copied,
            "aten::copy_": self._put,
            "aten::mul": self._multiplied,
            "aten::sigmoid": self._sigmoid,
        }

    def __call__(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> torch.Tensor | None:
        """Return what an operator gives; None, and nothing is done, where no native one does the same."""
        operator = self._operators.get(name)
        return None if operator is None else operator(*args, **kwargs)

    def _copied(
        self, x: torch.Tensor, *, dtype: torch.dtype | None = None, memory_format: object = None, **others: object
    ) -> torch.Tensor | None:
        # A copy keeps the order of dimensions, of which only rows with gaps between them lie as a contiguous one does.
        plain = x.is_contiguous() or (x.dim() == _MATRIX and x.stride(1) == 1 <= x.stride(0))
        if not (plain or memory_format is torch.contiguous_format) or any(others.values()) or not self._have_rows(x):
            return None
        done: torch.Tensor = self._kernels.copy_rows(x, dtype)
        return done

    def _put(self, to: torch.Tensor, x: torch.Tensor, non_blocking: bool = False) -> torch.Tensor | None:
        if to.shape != x.shape or not self._have_rows(to, x):
            return None
        self._kernels.put_rows_(to, x)
        return to

    def _added(self, a: object, b: object, **others: object) -> torch.Tensor | None:
        if others or not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and self._have_rows(a, b)):
            return None
        done: torch.Tensor = self._kernels.add_rows(a, b)
        return done

    def _multiplied(self, a: object, b: object) -> torch.Tensor | None:
        if not isinstance(a, torch.Tensor):
            return None
        done: torch.Tensor | None = None
        if isinstance(b, torch.Tensor) and self._have_rows(a, b):
            done = self._kernels.mul_rows(a, b)
        elif isinstance(b, (int, float)) and a.is_floating_point() and self._have_rows(a):
            done = self._kernels.scale_rows(a, b)
        return done

    def _sigmoid(self, x: torch.Tensor) -> torch.Tensor | None:
        done: torch.Tensor | None = None
        if x.is_floating_point() and self._have_rows(x):
            done = self._kernels.sigmoid_rows(x)
        return done

    def _have_rows(self, *operands: torch.Tensor) -> bool:
        """Return whether the rows of what the operands give are those of the pass."""
        dims = max(one.dim() for one in operands)
        counts = {one.shape[0] for one in operands if one.dim() == dims and dims > 0}
        return self._rows in counts and counts <= {self._rows, 1}
