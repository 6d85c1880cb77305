"""Adapts how SGLang reads pickles that an engine receives: they may rebuild tensors, and do nothing else.

SGLang's own reader accepts names of whole modules, `builtins` among them, with which a pickle can run any program.

A pickle is a program for a small machine. It looks names up, calls them (REDUCE, NEWOBJ), and sets attributes of
objects (BUILD), also of a class that the whole process uses. Each of these is limited here, and only the instructions
that tensors need are accepted.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import torch

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    import sglang.srt.model_loader.weight_utils as weight_utils_module
    import sglang.srt.utils.common as common_module

__all__ = ["TensorUnpickler", "read_pickles_strictly"]

_REDUCTIONS = "torch.multiprocessing.reductions"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
# Functions that a pickle may call. `_load_from_bytes` of torch.storage is not among them: it reads another pickle.
_FUNCTIONS = frozenset(
    {
        (_REDUCTIONS, "rebuild_tensor"),
        (_REDUCTIONS, "rebuild_typed_storage"),
        (_REDUCTIONS, "rebuild_storage_fd"),
        (_REDUCTIONS, "rebuild_storage_filename"),
        (_REDUCTIONS, "rebuild_storage_empty"),
        (_REDUCTIONS, "rebuild_cuda_tensor"),
        ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
        ("torch", "Size"),
        ("torch", "device"),
        ("collections", "OrderedDict"),
    }
)
# Classes of which a pickle may make objects without arguments, and set their fields.
_STRUCTS = frozenset(
    {
        ("multiprocessing.resource_sharer", "DupFd"),
        ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"),
        (_UPDATER, "LocalSerializedTensor"),
    }
)
# Types that may be arguments.
_TYPES = frozenset(
    {
        ("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
        ("torch.storage", "UntypedStorage"),
        ("torch.storage", "TypedStorage"),
        *(("torch", name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
    }
)
_INSTRUCTIONS = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINUNICODE8),
    *(pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD),
)


class _Handlers(dict[int, Any]):
    def __missing__(self, code: int) -> Any:
        raise pickle.UnpicklingError(f"the pickle has the instruction {bytes([code])!r}, which tensors do not need")


class TensorUnpickler(pickle._Unpickler):
    """Reads tensors, plain values, and lists, tuples and dicts of them. It replaces SGLang's SafeUnpickler.

    Raises UnpicklingError, which says what was refused, before it calls anything. It derives from Python's reader in
    Python, because the reader in C cannot be extended. Its pickles are small: tensors are sent as handles of memory.
    """

    # Attributes of Python's own reader that its type stubs lack.
    stack: list[Any]
    load_reduce: Any
    load_newobj: Any
    load_build: Any

    dispatch = _Handlers({code[0]: pickle._Unpickler.dispatch[code[0]] for code in _INSTRUCTIONS})

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._functions: list[Any] = []
        self._structs: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a pickle names, if the name is allowed."""
        full_name = (module, name)
        if full_name not in _FUNCTIONS | _STRUCTS | _TYPES:
            raise pickle.UnpicklingError(
                f"the pickle names {module}.{name}, which tensors do not need: send plain tensors, or load_format "
                "'safetensors'"
            )
        found = getattr(importlib.import_module(module), name)
        if full_name in _FUNCTIONS:
            self._functions.append(found)
        if full_name in _STRUCTS:
            self._structs.append(found)
        return found

    def _call(self) -> None:
        function = self.stack[-2]
        if not any(function is known for known in self._functions):
            raise pickle.UnpicklingError(f"the pickle calls {function!r}, which may not be called")
        self.load_reduce()

    def _make(self) -> None:
        kind, arguments = self.stack[-2:]
        if arguments != () or not any(kind is known for known in self._structs):
            raise pickle.UnpicklingError(f"the pickle makes {kind!r} of {arguments!r}, which may not be made")
        self.load_newobj()

    def _fill(self) -> None:
        target, fields = self.stack[-2:]
        if not isinstance(fields, dict) or type(target) not in self._structs:
            raise pickle.UnpicklingError(f"the pickle sets attributes of {target!r}, which may not be set")
        self.load_build()

    dispatch.update({pickle.REDUCE[0]: _call, pickle.NEWOBJ[0]: _make, pickle.BUILD[0]: _fill})


def read_pickles_strictly() -> None:
    """Let SGLang, in this process, read all received tensors with `TensorUnpickler`, and files by torch's safe reader.

    SGLang would run any program in a checkpoint of torch's old form.
    """
    common_module.SafeUnpickler = TensorUnpickler
    weight_utils_module._load_pt_file = _load_pt_file


def _load_pt_file(path: str) -> Any:
    """Read the tensors of a file. Raises torch's errors, also for the old form, which can only be read as a program."""
    return torch.load(path, map_location="cpu", weights_only=True)
