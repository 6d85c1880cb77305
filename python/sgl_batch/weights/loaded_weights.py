"""Owns the proof that a checkpoint and a model fit: each parameter is loaded, and each tensor of the files is used.

SGLang's models ignore names that they do not know, and leave a parameter that no tensor names as it was allocated.
Both give wrong tokens without an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import get_ident
from typing import TypeGuard

import torch
from torch import Tensor, nn

from sgl_batch.checkpoint.expert_layout import layer_number
from sgl_batch.checkpoint.files import few
from sgl_batch.checkpoint.quantised import is_kept_as_floats
from sgl_batch.errors import ConfigError
from sgl_batch.memory.page_advice import populate

# By dtype, bits that no computation gives: a NaN with a payload, or any NaN if the format has no payloads.
_NANS: Mapping[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF5_A5A5_A5A5_A5A5),
    torch.float32: (torch.int32, 0x7FA5_A5A5),
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float16: (torch.int16, 0x7DA5),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
    torch.float8_e5m2: (torch.uint8, 0x7D),
}
# By the size in bytes of a dtype that is no float, the integers as which its bits are viewed.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# What a checkpoint of packed weights may lack: the order of groups if it is the plain one, and shapes.
_OPTIONAL = re.compile(r"g_idx(_sort_indices)?$|_shape$")
_SCALE = re.compile(r"scales?(_inv)?$")
# What SGLang computes itself: scales of the KV cache have defaults if a checkpoint has none.
_COMPUTED = re.compile(r"\.attn(_m[qh]a)?\.[kv]_scale$")
# Tables in older checkpoints that every library computes.
_KNOWN_UNUSED = re.compile(r"rotary_emb\.inv_freq$|rotary_emb\.(cos|sin)_cached$|\.masked_bias$")
# How often a layer is looked at that is not loaded whole when the tensors of another one come.
_MOST_LOOKS = 3
# Of memory that a thread takes from the kernel at a time.
_PIECE_BYTES = 16 << 20
# Of tensors that are no longer in the caches when their parameter is read again.
_LARGE_BYTES = 1 << 20
_NUMBERED = re.compile(r"(?:^|\.)\d+\.")


Adopt = Callable[[nn.Module, Collection[str]], None]
"""Takes a model, and the names of parameters that are loaded. It may give those of matrices another form."""

Copy = Callable[[Tensor, Tensor], None]
"""Copies to the first tensor from the second; they have the same shape and dtype, and are contiguous on the CPU."""


class LoadedWeights:
    """Checks one load of a checkpoint of `num_layers` layers.

    `is_elsewhere`: whether another rank loads the tensor of this name. `is_tied`: whether the output embedding is the
    input embedding. `by_layer`: takes a model, and returns which parameters, by name, are loaded from tensors of their
    layers, by number, and by this rank alone. A layer's memory of these, which is new, is first written to when its
    weights come: until then the next weights can be read. And what it holds is given to `adopt` once it is whole, in a
    thread of its own, while the next layer is loaded: smaller forms never come on top of all exact weights, and later
    layers take the memory that the exact weights of earlier ones leave. `copy`: copies large tensors in place of torch.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        is_tied: bool,
        is_elsewhere: Callable[[str], bool],
        by_layer: Callable[[nn.Module], Callable[[str], bool]] = lambda _: lambda _: False,
        adopt: Adopt | None = None,
        copy: Copy | None = None,
    ) -> None:
        self._num_layers, self._is_tied, self._is_elsewhere = num_layers, is_tied, is_elsewhere
        self._by_layer, self._adopt, self._copy = by_layer, adopt, copy

    def load(
        self,
        model: nn.Module,
        weights: Iterable[tuple[str, Tensor]],
        load_weights: Callable[[Iterable[tuple[str, Tensor]]], object],
    ) -> None:
        """Call `load_weights` with `weights`. Raises ConfigError that names what is not loaded or not used."""
        parameters = {
            name: one
            for name, one in model.named_parameters()
            if not _COMPUTED.search(name) and (one.is_floating_point() or not _OPTIONAL.search(name))
        }
        is_by_layer, unread, left_over = self._by_layer(model), _Unread(self._copy), _LeftOver()
        by_layer = {name: one for name, one in parameters.items() if is_by_layer(name)}
        marks = _Marks(parameters, left_over, by_layer=by_layer.keys())
        with _EarlyAdoption(model, by_layer, self._adopt, unread, left_over) as early:
            load_weights(_Read.over(marks.before(early.between(weights)), unread))
        marks.set_all()
        left = {name: one for name, one in parameters.items() if name not in early.adopted}
        unread.leave_out(left.values())
        unused = [name for name in unread.addresses if not self._may_stay_unused(name)]
        missing = [f"{name}{_part(one.data)}" for name, one in left.items() if _marked_rows(one.data).any()]
        if missing or unused:
            raise ConfigError(_mismatch(missing, unused))
        _check_scales({name: one.data for name, one in parameters.items() if _SCALE.search(name)})

    def _may_stay_unused(self, name: str) -> bool:
        """Whether the model needs no such tensor. Layers beyond its own predict further tokens in a separate model."""
        layer = layer_number(name)
        beyond = layer is not None and layer >= self._num_layers
        tied = self._is_tied and name.endswith("lm_head.weight")
        further = beyond or tied or name.startswith("mtp.")
        return further or _KNOWN_UNUSED.search(name) is not None or self._is_elsewhere(name)


def _take_memory(parameters: Sequence[Tensor]) -> None:
    """Take the memory of large parameters, which is new, by all threads: the kernel clears it before it gives it."""
    whole = [one.view(-1) for one in parameters if one.device.type == "cpu" and one.is_contiguous()]
    pieces = [piece for one in whole for piece in one.split(_PIECE_BYTES // one.itemsize)]
    if len(pieces) > len(whole):
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(populate, pieces))


class _LeftOver:
    """The memory of parameters that have another form by now, for parameters of the same shape and number type."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def put(self, before: Tensor, parameter: nn.Parameter) -> None:
        """Take what a parameter held, if that is no longer its memory."""
        if not _is_same_memory(before, parameter.data):
            self._tensors.append(before)

    def give(self, parameter: nn.Parameter) -> bool:
        """Give a parameter, to which nobody has written, such memory; return whether there is some."""
        for index, one in enumerate(self._tensors):
            if (one.shape, one.dtype) == (parameter.shape, parameter.dtype) and one.is_contiguous():
                parameter.data = self._tensors.pop(index)
                return True
        return False


class _Marks:
    """Marks the numbers of parameters as not loaded, each before a tensor can be loaded into it."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], left_over: _LeftOver, *, by_layer: Collection[str]
    ) -> None:
        self._waiting: dict[int | None, list[tuple[str, nn.Parameter]]] = {}
        self._left_over = left_over
        for name, parameter in parameters.items():
            self._waiting.setdefault(layer_number(name) if name in by_layer else None, []).append((name, parameter))
        self._set(None)

    def before(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights`, the parameters of whose layers are marked by then."""
        for name, weight in weights:
            if self._waiting:
                layer = layer_number(name)
                if layer is not None:
                    self._set(layer)
                elif _NUMBERED.search(name):  # of whichever layer
                    self.set_all()
            yield name, weight

    def set_all(self) -> None:
        """Mark what is not marked yet."""
        for layer in list(self._waiting):
            self._set(layer)

    def _set(self, layer: int | None) -> None:
        found = self._waiting.pop(layer, [])
        new = [one.data for _, one in found if not self._left_over.give(one)]
        _take_memory(new)
        for _, one in found:
            _mark(one.data)


@dataclass(slots=True)
class _Unread:
    """The addresses of tensors that nobody has read yet, by name, and the threads that have read any.

    `copy`: copies large ones, if not torch.
    """

    copy: Copy | None = None
    addresses: dict[str, int] = field(default_factory=dict)
    readers: set[int] = field(default_factory=set)

    def leave_out(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget the tensors whose memory parameters have taken over."""
        own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        for name in [name for name, address in self.addresses.items() if address in own]:
            del self.addresses[name]


class _EarlyAdoption:
    """Gives the parameters of layers to `adopt` as soon as they are loaded. Entered while a checkpoint is loaded.

    A layer is looked at when the tensors of another one come. It is whole if no mark is left in it, provided that one
    thread has read all tensors until then: one of several might still be writing behind the end of a row.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        adopt: Adopt | None,
        unread: _Unread,
        left_over: _LeftOver,
    ) -> None:
        self.adopted: set[str] = set()
        self._model, self._adopt, self._unread, self._left_over = model, adopt, unread, left_over
        self._layers: dict[int, dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():
            layer = None if adopt is None else layer_number(name)
            if layer is not None:
                self._layers.setdefault(layer, {})[name] = parameter
        self._looks = dict.fromkeys(self._layers, 0)
        self._seen: dict[int, set[str]] = {layer: set() for layer in self._layers}
        self._thread, self._last = ThreadPoolExecutor(1, thread_name_prefix="adopt"), Future[None]()
        self._last.set_result(None)

    def __enter__(self) -> _EarlyAdoption:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._thread.shutdown(cancel_futures=kind is not None)
        if kind is None:
            self._last.result()

    def between(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights`. Before the first tensor of another layer, look at the one whose tensors came until then."""
        coming: int | None = None
        for name, weight in weights:
            layer = layer_number(name)
            if coming is not None and layer != coming:
                self._look_at(coming)
            coming = layer
            if layer in self._seen:
                self._check_new(layer, name, weight)
                self._seen[layer].add(name)
            yield name, weight

    def _check_new(self, layer: int, name: str, weight: Tensor) -> None:
        """Refuse a matrix that would be loaded again, into a parameter that may have another form by now."""
        again = layer not in self._layers and name in self._seen[layer]
        if again and weight.dim() > 1 and not is_kept_as_floats(name):
            raise ConfigError(
                f"the checkpoint has {name} twice, in files that are read one after the other: remove the files that "
                "its index does not name, or fetch the checkpoint anew"
            )

    def _look_at(self, layer: int) -> None:
        parameters = self._layers.get(layer)
        if parameters is None or self._looks[layer] == _MOST_LOOKS or self._unread.readers - {get_ident()}:
            return
        self._looks[layer] += 1
        if any(_marked_rows(one.data).any() for one in parameters.values()):
            return
        del self._layers[layer]
        self.adopted |= parameters.keys()
        self._unread.leave_out(parameters.values())
        self._last.result()  # one layer waits at most, whose memory may shrink
        self._last = self._thread.submit(self._adopt_layer, parameters)

    def _adopt_layer(self, parameters: Mapping[str, nn.Parameter]) -> None:
        assert self._adopt is not None, "without it there are no layers"
        before = [(one, one.data) for one in parameters.values()]
        self._adopt(self._model, list(parameters))
        for parameter, data in before:
            self._left_over.put(data, parameter)


class _Read(Tensor):
    """A tensor of a checkpoint that removes itself from `unread` when an operator reads it, in any thread.

    A view is a `_Read` too, and making one is not a use. A parameter may also take over the tensor's memory without an
    operator; `_Unread` compares addresses for that.
    """

    stored_name: str
    unread: _Unread

    @classmethod
    def over(cls, weights: Iterable[tuple[str, Tensor]], unread: _Unread) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights`, each of which is in `unread` until it is read."""
        for name, weight in weights:
            if weight.numel() > 0:
                unread.addresses[name] = weight.untyped_storage().data_ptr()
            yield name, _noting(weight, name, unread)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        read = [one for one in _tensors((*args, *kwargs.values())) if isinstance(one, _Read)]
        for one in read:
            one.unread.readers.add(get_ident())
        with torch._C.DisableTorchFunctionSubclass():
            result = _call(func, args, kwargs, read[0].unread.copy if read else None)
        if isinstance(result, Tensor) and any(_is_same_memory(result, one) for one in read):
            return _noting(result, read[0].stored_name, read[0].unread)
        if isinstance(result, (list, tuple)) and all(isinstance(one, Tensor) for one in result):
            return type(result)(_noting(one, read[0].stored_name, read[0].unread) for one in result)
        if isinstance(result, Tensor) or func in _READING:
            for one in read:
                one.unread.addresses.pop(one.stored_name, None)
        return result


# Operators that read numbers and return no tensor.
_READING = (
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__float__,
    Tensor.__int__,
    Tensor.__bool__,
    Tensor.__setitem__,
)


def _call(
    func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], copy: Copy | None
) -> object:
    """Call an operator, or in place of one that copies a large tensor, `copy`."""
    if copy is None or func is not Tensor.copy_ or kwargs or not _are_of_copy(args):
        return func(*args, **kwargs)
    to, source = args
    copy(to, source)
    return to


def _are_of_copy(args: Sequence[object]) -> TypeGuard[tuple[Tensor, Tensor]]:
    """Return whether the arguments of `Tensor.copy_` are those of a `Copy`, and large."""
    to, source, *more = args
    if more or not (isinstance(to, Tensor) and isinstance(source, Tensor)):
        return False
    return (
        to.nbytes >= _LARGE_BYTES
        and (to.shape, to.dtype) == (source.shape, source.dtype)
        and to.device.type == source.device.type == "cpu"
        and to.is_contiguous()
        and source.is_contiguous()
    )


def _noting(tensor: Tensor, name: str, unread: _Unread) -> _Read:
    noting = tensor.as_subclass(_Read)
    noting.stored_name, noting.unread = name, unread
    return noting


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@dataclass(frozen=True, slots=True)
class _Mark:
    """The mark that the ends of a parameter's rows hold until they are loaded.

    `bits`: those of a NaN. None stands for a pseudo-random pattern, for dtypes in which any bits may be a weight. There
    an end counts as not loaded only in a run of `num_rows` rows: its 64 bits are a checkpoint's own by chance once in
    2^64.
    """

    integers: torch.dtype
    bits: int | None
    num_rows: int

    @classmethod
    def of(cls, dtype: torch.dtype) -> _Mark | None:
        """Return the mark for a parameter of this dtype; None if there is none."""
        if dtype in _NANS:
            return cls(*_NANS[dtype], 1)
        integers = _INTEGERS.get(dtype.itemsize)
        return None if integers is None or dtype is torch.bool else cls(integers, None, 8 // dtype.itemsize)

    def ends(self, data: Tensor) -> Tensor | None:
        """Return a view of the first and last number of each row [..., 1 or 2]; of all numbers if rows are too few.

        None if there are too few numbers, or if they share memory.
        """
        view = data.view(self.integers)
        if data.dim() == 0:
            view = view.reshape(1)
        if any(step == 0 and size > 1 for step, size in zip(view.stride(), view.shape, strict=True)):
            return None
        if view.numel() < self.num_rows:
            return None
        if view.numel() < self.num_rows * view.shape[-1]:
            return view.unsqueeze(-1)
        return view[..., :: max(1, view.shape[-1] - 1)]

    def on(self, ends: Tensor) -> Tensor:
        """Return what `ends` hold until they are loaded."""
        if self.bits is not None:
            return torch.full_like(ends, self.bits)
        positions = torch.arange(ends.numel(), device=ends.device).reshape(ends.shape)
        return _scrambled(positions).to(ends.dtype)  # the low bits


def _scrambled(numbers: Tensor) -> Tensor:
    """Return int64 numbers with bits that look random, equal on every device: the last steps of splitmix64."""
    for shift, factor in ((30, -0x40A7_B892_E31B_1A47), (27, -0x6B2F_B644_ECCE_EE15)):
        numbers = (numbers + 0x1E37_79B9_7F4A_7C15) ^ (numbers >> shift)
        numbers = numbers * factor
    return numbers ^ (numbers >> 31)


def _in_runs(matches: Tensor, length: int) -> Tensor:
    """Return those of `matches` [rows, ends] that lie in a run of at least `length` rows, bool [rows, ends]."""
    if length == 1 or matches.shape[0] < length:
        return matches if length == 1 else torch.zeros_like(matches)
    columns = matches.t().unsqueeze(1).float()  # [ends, 1, rows]
    begins = -nn.functional.max_pool1d(-columns, length, stride=1)  # 1 where a run begins
    padded = nn.functional.pad(begins, (length - 1, length - 1))
    return nn.functional.max_pool1d(padded, length, stride=1).squeeze(1).t() > 0


def _mark(data: Tensor) -> None:
    mark = _Mark.of(data.dtype)
    ends = None if mark is None else mark.ends(data)
    if mark is not None and ends is not None:
        ends.copy_(mark.on(ends))


def _marked_rows(data: Tensor) -> Tensor:
    """Return which rows still hold a mark, bool [rows]; empty for a dtype without a mark."""
    mark = _Mark.of(data.dtype)
    ends = None if mark is None else mark.ends(data)
    if mark is None or ends is None:
        return torch.zeros(0, dtype=torch.bool)
    matches = (ends == mark.on(ends)).reshape(-1, ends.shape[-1])
    return _in_runs(matches, mark.num_rows).any(dim=1)


def _num_infinite(data: Tensor) -> int:
    """Return how many numbers are infinite or NaN."""
    return int(torch.count_nonzero(~torch.isfinite(data.float())))


def _part(data: Tensor) -> str:
    """Say which part is not loaded, if not all of it: experts by number, else the count of rows."""
    marked = _marked_rows(data)
    if bool(marked.all()):
        return ""
    if data.dim() < 3:
        return f" ({int(marked.sum())} of {len(marked)} rows)"
    experts = marked.reshape(data.shape[0], -1).any(dim=1).nonzero().flatten().tolist()
    return f" (experts {few(map(str, experts))})"


def _check_scales(scales: Mapping[str, Tensor]) -> None:
    spoiled = [name for name, one in scales.items() if one.is_floating_point() and _num_infinite(one)]
    if spoiled:
        raise ConfigError(
            f"{len(spoiled)} scales of the checkpoint's weights hold infinities or NaNs: {few(spoiled)}. "
            "Its answers would be wrong: quantise the model anew, or fetch the checkpoint anew"
        )


def _mismatch(missing: Sequence[str], unused: Sequence[str]) -> str:
    parts = []
    if missing:
        parts.append(f"it has nothing for {len(missing)} parameters of the model: {few(missing)}")
    if unused:
        parts.append(f"the model has no place for {len(unused)} of its tensors: {few(unused)}")
    return (
        f"the checkpoint and SGLang's model differ: {'; '.join(parts)}. Its answers would be wrong: give the complete "
        "checkpoint that belongs to the config, or a model whose architecture SGLang implements in this form"
    )
