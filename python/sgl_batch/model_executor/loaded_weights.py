"""Owns the proof that a checkpoint and a model fit: each parameter is loaded, and each tensor of the files is used.

SGLang's models pass over names that they do not know, and leave parameters that no tensor names as they were
allocated. Both give wrong tokens without a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from sgl_batch.errors import ConfigError

_MOST_NAMED = 6
# Bits that no computation gives, by dtype: a NaN with a payload, and of formats without one any NaN.
_MARKS: Mapping[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF5_A5A5_A5A5_A5A5),
    torch.float32: (torch.int32, 0x7FA5_A5A5),
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float16: (torch.int16, 0x7DA5),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
    torch.float8_e5m2: (torch.uint8, 0x7D),
}
# What SGLang computes itself: scales of the KV cache have defaults that stand where a checkpoint has none.
_COMPUTED = re.compile(r"\.attn(_m[qh]a)?\.[kv]_scale$")
# Tables that older checkpoints hold and every library computes.
_KNOWN_UNUSED = re.compile(r"rotary_emb\.inv_freq$|rotary_emb\.(cos|sin)_cached$|\.masked_bias$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class LoadedWeights:
    """Watches one load of a checkpoint of `num_layers` layers.

    `is_elsewhere`: holds for names of tensors that another rank loads. `is_tied`: the output embedding is the input's.
    """

    def __init__(self, num_layers: int, *, is_tied: bool, is_elsewhere: Callable[[str], bool]) -> None:
        self._num_layers, self._is_tied, self._is_elsewhere = num_layers, is_tied, is_elsewhere

    def load(
        self,
        model: nn.Module,
        weights: Iterable[tuple[str, Tensor]],
        load_weights: Callable[[Iterable[tuple[str, Tensor]]], object],
    ) -> None:
        """Call `load_weights` with `weights`. Raises ConfigError that names what is not loaded and not used."""
        parameters = {name: one for name, one in model.named_parameters() if not _COMPUTED.search(name)}
        for parameter in parameters.values():
            _mark(parameter.data)
        unread: dict[str, int] = {}
        load_weights(_Read.over(weights, unread))
        own = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
        unused = [name for name, address in unread.items() if address not in own and not self._may_stay_unused(name)]
        missing = [f"{name}{_part(one.data)}" for name, one in parameters.items() if _marked_rows(one.data).any()]
        if missing or unused:
            raise ConfigError(_mismatch(missing, unused))

    def _may_stay_unused(self, name: str) -> bool:
        """Layers beyond the model's predict further tokens; SGLang reads them as a model of their own."""
        layer = _LAYER.search(name)
        beyond = layer is not None and int(layer[1]) >= self._num_layers
        tied = self._is_tied and name.endswith("lm_head.weight")
        further = beyond or tied or name.startswith("mtp.")
        return further or _KNOWN_UNUSED.search(name) is not None or self._is_elsewhere(name)


class _Read(Tensor):
    """A tensor of a checkpoint that leaves `unread`, names with addresses, when an operator reads it in any thread.

    A view of it is one, too, and is not yet a use. A parameter may become one's memory, without an operator.
    """

    stored_name: str
    unread: dict[str, int]

    @classmethod
    def over(cls, weights: Iterable[tuple[str, Tensor]], unread: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
        """`weights`, each of which is in `unread` until it is read."""
        for name, weight in weights:
            if weight.numel() > 0:
                unread[name] = weight.untyped_storage().data_ptr()
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
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        read = [one for one in _tensors((*args, *kwargs.values())) if isinstance(one, _Read)]
        if isinstance(result, Tensor) and any(_is_same_memory(result, one) for one in read):
            return _noting(result, read[0].stored_name, read[0].unread)
        if isinstance(result, (list, tuple)) and all(isinstance(one, Tensor) for one in result):
            return type(result)(_noting(one, read[0].stored_name, read[0].unread) for one in result)
        if isinstance(result, Tensor) or func in _READING:
            for one in read:
                one.unread.pop(one.stored_name, None)
        return result


# What reads numbers and returns no tensor.
_READING = (Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__, Tensor.__bool__)


def _noting(tensor: Tensor, name: str, unread: dict[str, int]) -> _Read:
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


def _ends(data: Tensor) -> Tensor:
    """The first and the last number of each row: whatever is loaded in part is loaded by rows or by columns."""
    rows = data.reshape(-1, data.shape[-1]) if data.dim() > 0 else data.reshape(1, 1)
    return rows[:, :: max(1, rows.shape[1] - 1)]


def _mark(data: Tensor) -> None:
    if data.dtype in _MARKS and data.numel() > 0 and data.is_contiguous():
        integers, bits = _MARKS[data.dtype]
        _ends(data.view(integers)).fill_(bits)


def _marked_rows(data: Tensor) -> Tensor:
    """[rows] bool: which still hold a mark. None of a dtype without one."""
    if data.dtype not in _MARKS or data.numel() == 0 or not data.is_contiguous():
        return torch.zeros(0, dtype=torch.bool)
    integers, bits = _MARKS[data.dtype]
    return (_ends(data.view(integers)) == bits).any(dim=1)


def _part(data: Tensor) -> str:
    """Which part is not loaded, where it is not all: experts by their number, else rows."""
    marked = _marked_rows(data)
    if bool(marked.all()):
        return ""
    if data.dim() < 3:
        return f" ({int(marked.sum())} of {len(marked)} rows)"
    experts = marked.reshape(data.shape[0], -1).any(dim=1).nonzero().flatten().tolist()
    return f" (experts {_few(map(str, experts))})"


def _mismatch(missing: Sequence[str], unused: Sequence[str]) -> str:
    parts = []
    if missing:
        parts.append(f"it has nothing for {len(missing)} parameters of the model: {_few(missing)}")
    if unused:
        parts.append(f"the model has no place for {len(unused)} of its tensors: {_few(unused)}")
    return (
        f"the checkpoint and SGLang's model differ: {'; '.join(parts)}. Its answers would be wrong: give the complete "
        "checkpoint that belongs to the config, or a model whose architecture SGLang implements in this form"
    )


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _MOST_NAMED
    return ", ".join(listed[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
