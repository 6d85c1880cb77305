"""Decides whether the tensors and the tokenizer of a checkpoint belong to its config, by headers and small tensors.

Loading checks every parameter; this reports frequent mistakes before any process starts. A config without numbers to
compare with passes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sgl_batch.checkpoint.files import NOT_READABLE, StoredTensor, few
from sgl_batch.errors import ConfigError

# Prefixes of the names of a text model that is one part of a larger model.
_ROOT = r"^(?:language_model\.|model\.)*"
_EMBEDDING = re.compile(_ROOT + r"(?:embed_tokens|lm_head)\.weight$")
_LAYER = re.compile(_ROOT + r"layers\.(\d+)\.(?:.*\.experts\.(\d+)\.)?")
_PLAIN = ("F32", "F16", "BF16")
_SCALE = re.compile(r"weight_scale(_inv)?$")
# By number type, its bits as an integer type and the mask of its exponent: all set means infinity or NaN.
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80), "F8_E8M0": ("u1", 0xFF)}
# Limits of the sample of scales. The largest checkpoints have tens of thousands of scales, all over their files, and
# reading them all from a cold disk takes seconds. A fault (an overflow in the quantising tool) spoils many of them, and
# loading checks all.
_MOST_SCALES, _MOST_SCALE_BYTES = 512, 16 << 20


def check_shapes(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], experts: int | None, *, is_part: bool
) -> None:
    """Raise ConfigError if the config has other numbers of rows, layers or experts than the checkpoint.

    `config`: the part that describes the text model. `is_part`: whether the config has other parts. `experts`: the
    experts of each layer; None if the config does not say.
    """
    for name, tensor in tensors.items():
        if tensor.dtype in _PLAIN and len(tensor.shape) == 2 and _EMBEDDING.search(name):
            _check_embedding(config, name, tensor, is_part=is_part)
    found = _experts_of_layers(tensors)
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or not found:
        return
    if absent := [number for number in range(layers) if number not in found]:
        raise ConfigError(
            f"the checkpoint has no tensor of {len(absent)} layers ({few(map(str, absent))}), and config.json says "
            f"num_hidden_layers {layers}; fetch the files that have them, or the config that belongs to these"
        )
    for layer, numbers in sorted(found.items()):
        if experts is not None and layer < layers and numbers and numbers != set(range(experts)):
            raise ConfigError(
                f"layer {layer} of the checkpoint has {len(numbers)} experts, the last of number {max(numbers)}, and "
                f"config.json says {experts}; fetch the files and the config of one checkpoint"
            )


def _check_embedding(config: Mapping[str, Any], name: str, tensor: StoredTensor, *, is_part: bool) -> None:
    rows, columns = config.get("vocab_size"), config.get("hidden_size")
    if not isinstance(rows, int) or not isinstance(columns, int) or tensor.shape == (rows, columns):
        return
    if is_part and tensor.shape[0] >= rows and tensor.shape[1] == columns:
        return  # other parts may have tokens of their own after those of the text
    raise ConfigError(
        f"{name} is {list(tensor.shape)} in {tensor.file}, and config.json says vocab_size {rows} and hidden_size "
        f"{columns}; fetch the weights and the config of one checkpoint"
    )


def _experts_of_layers(tensors: Mapping[str, StoredTensor]) -> dict[int, set[int]]:
    """Return by layer the numbers of the experts that have tensors of their own."""
    found: dict[int, set[int]] = {}
    for name in tensors:
        if matched := _LAYER.match(name):
            numbers = found.setdefault(int(matched[1]), set())
            if matched[2] is not None:
                numbers.add(int(matched[2]))
    return found


def check_scales(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ConfigError for a scale of weights that is infinite or NaN, in a sample of all scales."""
    scales = [(name, one) for name, one in tensors.items() if _SCALE.search(name) and one.dtype in _EXPONENTS]
    left = _MOST_SCALE_BYTES
    for name, tensor in scales[:: max(1, -(-len(scales) // _MOST_SCALES))]:
        left -= tensor.num_bytes
        if left < 0:
            return
        if bad := _num_infinite(tensor):
            raise ConfigError(
                f"{name} in {tensor.file} has {bad} scales that are infinite or no numbers: every answer would be "
                "wrong; quantise the model again, or fetch the file anew"
            )


def _num_infinite(tensor: StoredTensor) -> int:
    import numpy as np  # only quantised checkpoints need it

    kind, exponent = _EXPONENTS[tensor.dtype]
    count = tensor.num_bytes // np.dtype(kind).itemsize
    numbers = np.fromfile(tensor.file, dtype=kind, count=count, offset=tensor.begin)
    return int(np.count_nonzero((numbers & exponent) == exponent))


class _Vocabulary(msgspec.Struct):
    """The vocabulary of a tokenizer.json: ids by token, or a list in the order of the ids."""

    vocab: dict[str, int] | list[Any] | None = None


class _Tokenizer(msgspec.Struct):
    model: _Vocabulary


def check_tokenizer_fits(path: Path, rows: int | None) -> None:
    """Raise ConfigError for an unreadable tokenizer.json, or one with tokens for which the model has no row.

    `rows`: rows of the model's embedding; None if not known. Added tokens may exceed them: a prompt with such a token
    is refused by itself.
    """
    try:
        vocabulary = msgspec.json.decode(path.read_bytes(), type=_Tokenizer).model.vocab
    except NOT_READABLE as error:
        raise ConfigError(f"{path} is no tokenizer ({error}); fetch it again") from error
    largest = max(vocabulary.values(), default=-1) if isinstance(vocabulary, dict) else len(vocabulary or ()) - 1
    if rows is not None and largest >= rows:
        raise ConfigError(
            f"the tokenizer {path} has tokens up to number {largest:,}, and the model's config says vocab_size "
            f"{rows:,}: it belongs to another model; give this one's (--tokenizer-path)"
        )
