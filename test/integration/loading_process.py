"""A process that loads a model, its files read past the page cache or not, and computes a prompt.

Arguments: a directory, a model, and `past` or `through`. It prints a JSON object: the bytes of the tensors that our
reader gave, how many weights are packed when all are loaded and in the end, and a digest of the logits.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from loaded_models import extend_batch, forward_parts, kv_indices_of, load

from sgl_batch.model_executor.cpu_operators import CpuOperators
from sgl_batch.weights import direct_tensors

TOKENS = 50
# Some blocks of a few tensors, and large tensors by themselves; their memory is used again.
BLOCK, AHEAD = 16 << 10, 64 << 10


def note_reads(sizes: list[int]) -> None:
    """Have all files read by our reader, in small blocks. Adds the bytes of each tensor to `sizes`."""
    own = direct_tensors.direct_tensors

    def read(files: Sequence[Path], *wanted: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in own(files, *wanted):
            sizes.append(tensor.nbytes)
            yield name, tensor

    direct_tensors._BLOCK_BYTES, direct_tensors._AHEAD_BYTES = BLOCK, AHEAD
    direct_tensors.files_to_read_past_it = list
    direct_tensors.direct_tensors = read


def note_packed(counts: list[int]) -> None:
    """Add to `counts` how many weights are packed before and after a loaded model is adopted."""
    own = CpuOperators.adopt

    def adopt(operators: CpuOperators, model: torch.nn.Module) -> None:
        counts.append(len(operators._weights))
        own(operators, model)
        counts.append(len(operators._weights))

    CpuOperators.adopt = adopt  # type: ignore[method-assign]


def main(directory: str, model: str, way: str) -> None:
    sizes: list[int] = []
    packed: list[int] = []
    note_packed(packed)
    if way == "past":
        note_reads(sizes)
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    runner = load(model, "bfloat16", Path(directory))
    indices = kv_indices_of(range(1, 9))
    runner.req_to_token_pool.req_to_token[0, : len(indices)] = indices.to(runner.req_to_token_pool.req_to_token.dtype)
    ids = torch.randint(runner.model.config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()
    batch = extend_batch(runner, [0], [0], [ids])
    batch.capture_hidden_mode = CaptureHiddenMode.NULL
    with torch.no_grad():
        (answer,) = forward_parts(runner, [batch])
    bits = answer.next_token_logits.contiguous().view(torch.uint8).numpy().tobytes()
    sys.stdout.write(
        json.dumps({"read": sum(sizes), "packed": packed, "logits": hashlib.sha256(bits).hexdigest()}) + "\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
