"""Owns what a pickle that an engine is given may name: what rebuilds tensors, by full name, and nothing else.

SGLang's own reader lets whole modules through, `builtins` among them, with which a pickle can run any program. Who may
send a pickle at all is decided by others.

A pickle is a program for a small machine. Besides looking names up, it can call what it has looked up (REDUCE, NEWOBJ)
and set attributes of what it has at hand (BUILD), also of a class that the whole process uses. Each of the three is
limited here, and only the instructions that tensors need are known at all.
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
# May be called. `_load_from_bytes` of torch.storage is not among them: it reads a pickle of its own.
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
# May be made without arguments, and given fields.
_RECORDS = frozenset(
    {
        ("multiprocessing.resource_sharer", "DupFd"),
        ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"),
        (_UPDATER, "LocalSerializedTensor"),
    }
)
# May be arguments.
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
    """Reads tensors, and lists, tuples and dicts of them and of plain values; in SGLang's SafeUnpickler's place.

    Raises UnpicklingError, with what was refused, before anything of it is called. It is Python's own reader in Python,
    since that in C has no place to stand between. What it reads is small: tensors travel as handles of their memory.
    """

    # Python's own reader has these, and its types do not tell of them.
    stack: list[Any]
    load_reduce: Any
    load_newobj: Any
    load_build: Any

    dispatch = _Handlers({code[0]: pickle._Unpickler.dispatch[code[0]] for code in _INSTRUCTIONS})

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._functions: list[Any] = []
        self._records: list[Any] = []

    def find_class(self, module: str, name: str) -> Any:
        """What a pickle names, if it may."""
        full_name = (module, name)
        if full_name not in _FUNCTIONS | _RECORDS | _TYPES:
            raise pickle.UnpicklingError(
                f"the pickle names {module}.{name}, which tensors do not need: send plain tensors, or load_format "
                "'safetensors'"
            )
        found = getattr(importlib.import_module(module), name)
        if full_name in _FUNCTIONS:
            self._functions.append(found)
        if full_name in _RECORDS:
            self._records.append(found)
        return found

    def _call(self) -> None:
        function = self.stack[-2]
        if not any(function is known for known in self._functions):
            raise pickle.UnpicklingError(f"the pickle calls {function!r}, which is not for calling")
        self.load_reduce()

    def _make(self) -> None:
        kind, arguments = self.stack[-2:]
        if arguments != () or not any(kind is known for known in self._records):
            raise pickle.UnpicklingError(f"the pickle makes {kind!r} of {arguments!r}, which is not for making")
        self.load_newobj()

    def _fill(self) -> None:
        record, fields = self.stack[-2:]
        if not isinstance(fields, dict) or type(record) not in self._records:
            raise pickle.UnpicklingError(f"the pickle sets attributes of {record!r}, whose they are not to set")
        self.load_build()

    dispatch.update({pickle.REDUCE[0]: _call, pickle.NEWOBJ[0]: _make, pickle.BUILD[0]: _fill})


def read_pickles_strictly() -> None:
    """Have SGLang, in this process, read all tensors that it is sent with `TensorUnpickler`, and files no otherwise.

    Of a checkpoint in an old form of torch's it would run whatever is in it.
    """
    common_module.SafeUnpickler = TensorUnpickler
    weight_utils_module._load_pt_file = _load_pt_file


def _load_pt_file(path: str) -> Any:
    """The tensors of a file. Raises torch's errors, also for the old form, which cannot be read but as a program."""
    return torch.load(path, map_location="cpu", weights_only=True)
