"""Owns counting, on a CPU, the operations that would make the host wait for a GPU. Tests decide which are allowed.

Inside `HostSyncs` each tensor counts as a device tensor or a host tensor. Host tensors are those that are made without
a `device`, and results computed only from these. All others are device tensors, also those made before. A copy that
`.to(device)` or `.cpu()` would make on a GPU is made here as well, so that host and device tensors never share memory.
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray}
_FACTORIES = _FROM_HOST | {
    getattr(torch, name)
    for name in "arange zeros ones empty full eye linspace rand randn randint randperm from_numpy frombuffer".split()
}
# The number of rows of their results depends on values, or the results are numbers on the host.
_SIZED_BY_VALUES = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::equal",
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_READS = {"tolist", "numpy", "__array__"}
# A Triton kernel may read values; Triton's interpreter reads them through torch, which does not count.
_INTERPRETER = "triton/runtime/interpreter.py"
_OURS = ("sgl_batch", "sglang", "loaded_models")


@dataclass(frozen=True, slots=True, order=True)
class Sync:
    """A call that waits. `kind`: its name; `where`: file and function of the engine's innermost code that makes it."""

    where: str
    kind: str


class HostSyncs:
    """Counts syncs while it is entered; `take` returns the counts and resets them."""

    def __init__(self) -> None:
        self._host: dict[int, torch.UntypedStorage] = {}
        self._found: Counter[Sync] = Counter()
        self._modes = (_Calls(self), _Operators(self))

    def __enter__(self) -> HostSyncs:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def take(self) -> Counter[Sync]:
        """Return the counts since the last call."""
        found, self._found = self._found, Counter()
        return found

    def count(self, kind: str) -> None:
        self._found[Sync(_where(), kind)] += 1

    def is_host(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._host

    def mark(self, tensor: torch.Tensor, *, host: bool) -> None:
        storage = tensor.untyped_storage()
        if host:
            self._host[storage._cdata] = storage
        else:
            self._host.pop(storage._cdata, None)


def _tensors(*values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_kernel() -> bool:
    return any(frame.f_code.co_filename.endswith(_INTERPRETER) for frame in _frames())


def _where() -> str:
    for frame in _frames():
        path = Path(frame.f_code.co_filename)
        package = next((name for name in _OURS if name in path.parts or path.stem == name), None)
        if package is not None and path != Path(__file__):
            inside = path.parts[len(path.parts) - path.parts[::-1].index(package) :] if package in path.parts else ()
            return f"{'/'.join((package, *inside))}:{frame.f_code.co_name}"
    return "test"


def _names_cpu() -> bool:
    """Return whether the source line of the call names "cpu": the device is called `cpu` here as well."""
    for frame in _frames():
        if frame.f_code.co_filename != __file__ and "/torch/" not in frame.f_code.co_filename:
            return '"cpu"' in linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return False


class _Calls(TorchFunctionMode):
    """Counts calls from Python: on a CPU some of them never reach an operator."""

    def __init__(self, syncs: HostSyncs) -> None:
        super().__init__()
        self._syncs = syncs

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if _is_kernel():
            return func(*args, **given)
        if func in _FACTORIES:
            return self._made(func, args, given)
        name = getattr(func, "__name__", "")
        if name in _READS and isinstance(args[0], torch.Tensor) and not self._syncs.is_host(args[0]):
            self._syncs.count(f".{name}")
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
            return self._moved(func, name, args, given)
        if name in ("__getitem__", "__setitem__") and not self._syncs.is_host(args[0]):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(index, list) for index in indices):
                self._syncs.count("indices of the host")
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **given)

    def _made(self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> torch.Tensor:
        pinned = {key: value for key, value in given.items() if key != "pin_memory"}
        made: torch.Tensor = func(*args, **pinned)
        on_device = given.get("device") is not None and not _names_cpu()
        if func in _FROM_HOST and isinstance(args[0], torch.Tensor):
            on_device |= given.get("device") is None and not self._syncs.is_host(args[0])
        elif func in _FROM_HOST and on_device:
            self._syncs.count(f"torch.{func.__name__}(device=)")
        self._syncs.mark(made, host=not on_device)
        return made

    def _moved(self, func: Callable[..., Any], name: str, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        source: torch.Tensor = args[0]
        was_host = self._syncs.is_host(source)
        moved = func(*args, **given)
        targets = [*args[1:], given.get("device")]
        if name == "to" and not any(isinstance(one, (str, torch.device, torch.Tensor)) for one in targets):
            return moved
        to_host = name == "cpu" or (name == "to" and _names_cpu())
        if name == "to" and isinstance(args[1], torch.Tensor):
            to_host = self._syncs.is_host(args[1])
        if to_host == was_host:
            return moved
        if not given.get("non_blocking", False):
            self._syncs.count(f".{name}({'cpu' if to_host else 'device'})")
        if moved.untyped_storage()._cdata == source.untyped_storage()._cdata:
            moved = moved.clone()
        self._syncs.mark(moved, host=to_host)
        return moved


class _Operators(TorchDispatchMode):
    """Counts calls of torch's operators, from Python or not."""

    def __init__(self, syncs: HostSyncs) -> None:
        super().__init__()
        self._syncs = syncs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        if _is_kernel():
            return result
        read = list(_tensors(args, given))
        is_host = [self._syncs.is_host(tensor) for tensor in read]
        name = func._schema.name
        if not all(is_host):
            self._count_operator(name, args, given)
        for tensor in _tensors(result):
            if not any(tensor is one for one in read):
                self._syncs.mark(tensor, host=bool(read) and all(is_host))
        return result

    def _count_if(self, waits: bool, kind: str) -> None:
        if waits:
            self._syncs.count(kind)

    def _count_operator(self, name: str, args: Sequence[Any], given: Mapping[str, Any]) -> None:
        """Count an operator that reads a device tensor, if it waits."""
        if name in _SIZED_BY_VALUES or (name == "aten::repeat_interleave" and given.get("output_size") is None):
            self._syncs.count(name)
        elif name in _INDEXING:
            for index in _tensors(args[1]):
                if index.dtype in (torch.bool, torch.uint8):
                    self._syncs.count(f"{name} by a mask")
                elif self._syncs.is_host(index) and not self._syncs.is_host(args[0]):
                    self._syncs.count(f"{name} by indices of the host")
        elif name == "aten::copy_" and not any(args[2:]) and not given.get("non_blocking", False):
            self._count_if(self._syncs.is_host(args[0]) != self._syncs.is_host(args[1]), name)
