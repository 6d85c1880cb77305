"""A pickle that an engine is sent gives tensors, and runs nothing."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from sgl_batch.sglang_adapter.received_pickles import TensorUnpickler, bootstrap, read_pickles_strictly

with bootstrap.importing():
    from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
    from sglang.srt.model_loader import weight_utils
    from sglang.srt.utils import MultiprocessingSerializer, common
    from sglang.srt.utils.patch_torch import _rebuild_cuda_tensor_modified
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

WEIGHT = torch.arange(12.0).reshape(3, 4)


def read(data: bytes) -> Any:
    return TensorUnpickler(io.BytesIO(data)).load()


def text(word: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(word)]) + word.encode()


def name(module: str, of: str) -> bytes:
    return text(module) + text(of) + pickle.STACK_GLOBAL


def program(*steps: bytes) -> bytes:
    return pickle.PROTO + b"\4" + b"".join(steps) + pickle.STOP


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + pickle.MARK + b"".join(arguments) + pickle.TUPLE + pickle.REDUCE


def get(module: bytes, attribute: str) -> bytes:
    return call(name("builtins", "getattr"), module, text(attribute))


COMMAND = "touch done"
# The first of these ran a command through SGLang's own reader.
ATTACKS: dict[str, bytes] = {
    "a module's attribute": call(get(call(name("builtins", "__import__"), text("os")), "system"), text(COMMAND)),
    "os.system": call(name("os", "system"), text(COMMAND)),
    "a dotted name": call(name("torch", "os.system"), text(COMMAND)),
    "a name in a module that may be named": call(name("torch.storage", "os.system"), text(COMMAND)),
    "a pickle in a pickle": call(name("torch.storage", "_load_from_bytes"), pickle.EMPTY_TUPLE),
    "a partial call": call(name("functools", "partial"), name("os", "system"), text(COMMAND)),
    "an old global": pickle.GLOBAL + b"os\nsystem\n" + text(COMMAND) + pickle.TUPLE1 + pickle.REDUCE,
    "an instance": pickle.MARK + text(COMMAND) + pickle.INST + b"os\nsystem\n",
    "an object": pickle.MARK + name("torch", "Tensor") + pickle.OBJ,
    "an extension": pickle.EXT1 + b"\1",
    "a persistent id": text("x") + pickle.BINPERSID,
    "a call of a type": call(name("torch", "Tensor"), pickle.EMPTY_TUPLE),
    "a record with arguments": name("torch", "Tensor") + pickle.EMPTY_TUPLE + pickle.NEWOBJ,
    "a method of a class": name("torch", "Tensor")
    + pickle.EMPTY_DICT
    + pickle.EMPTY_DICT
    + text("to")
    + name("torch", "Size")
    + pickle.SETITEM
    + pickle.TUPLE2
    + pickle.BUILD,
    "a default of a function": name("torch.multiprocessing.reductions", "rebuild_tensor")
    + pickle.EMPTY_DICT
    + text("x")
    + pickle.NONE
    + pickle.SETITEM
    + pickle.BUILD,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_pickle_with_more_than_tensors_is_refused_and_runs_nothing(attack: str, tmp_path: Path) -> None:
    command = f"touch {tmp_path}/done"
    steps = ATTACKS[attack].replace(text(COMMAND), text(command))
    method = torch.Tensor.to
    with pytest.raises(pickle.UnpicklingError, match="the pickle"):
        read(program(steps))
    assert not (tmp_path / "done").exists()
    assert torch.Tensor.to is method


def test_tensors_arrive_as_they_were_sent() -> None:
    bucket = FlattenedTensorBucket([("a", WEIGHT), ("b", WEIGHT.bfloat16())])
    sent = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    found = read(MultiprocessingSerializer.serialize(sent))
    again = FlattenedTensorBucket(flattened_tensor=found["flattened_tensor"], metadata=found["metadata"])
    assert [(name, tensor.dtype) for name, tensor in again.reconstruct_tensors()] == [
        ("a", torch.float32),
        ("b", torch.bfloat16),
    ]
    named = [("a", WEIGHT), ("p", torch.nn.Parameter(WEIGHT)), ("t", WEIGHT.T[1:]), ("e", torch.empty(0))]
    for kind in (list, OrderedDict):
        got = dict(read(MultiprocessingSerializer.serialize(kind(named))))
        assert all(torch.equal(got[key], tensor) for key, tensor in named)
    local = read(MultiprocessingSerializer.serialize(LocalSerializedTensor([b"a", b"b"])))
    assert local.values == [b"a", b"b"]


def test_memory_named_by_a_file_is_read() -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        data = MultiprocessingSerializer.serialize([("a", WEIGHT.clone())])
        assert b"rebuild_storage_filename" in data
        assert torch.equal(read(data)[0][1], WEIGHT)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def test_handles_of_gpu_memory_may_be_named() -> None:
    patched = name("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified")
    assert read(program(patched)) is _rebuild_cuda_tensor_modified
    assert read(program(name("torch.multiprocessing.reductions", "rebuild_cuda_tensor"))) is rebuild_cuda_tensor


def test_a_checkpoint_in_torchs_oldest_form_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_utils, "_load_pt_file", weight_utils._load_pt_file)
    monkeypatch.setattr(common, "SafeUnpickler", common.SafeUnpickler)
    attack = program(call(name("os", "system"), text(f"touch {tmp_path}/done")))
    for part in ("storages", "tensors", "pickle"):
        (tmp_path / part).write_bytes(attack)
    checkpoint = tmp_path / "pytorch_model.bin"
    with tarfile.open(checkpoint, "w") as file:
        for part in ("storages", "tensors", "pickle"):
            file.add(tmp_path / part, part)
    read_pickles_strictly()
    with pytest.raises(RuntimeError, match="legacy"):
        list(weight_utils.pt_weights_iterator([str(checkpoint)]))
    assert not (tmp_path / "done").exists()


def test_only_our_processes_read_pickles_strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "SafeUnpickler", common.SafeUnpickler)
    attack = program(name("builtins", "getattr"))
    assert MultiprocessingSerializer.deserialize(attack) is getattr
    read_pickles_strictly()
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.getattr"):
        MultiprocessingSerializer.deserialize(attack)
