"""Both page copies write exactly their target bytes, and the kernel compiles for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sgl_batch.kv_offload.page_copies import COPY_PROGRAMS, FusedPageCopy, PerPageCopy, programs_to_fill
from sgl_batch.kv_offload.store_geometry import StoreGeometry

# The environment of a process that runs the kernel under Triton's interpreter.
INTERPRETED = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem", "CUDA_VISIBLE_DEVICES": ""}
WIDTHS = {"keys and values": (2, 600), "latents": (37,)}

COMPILING = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sgl_batch.kv_offload.page_copy_kernel import copy_pages_kernel as kernel

pointers = {name: "*i64" for name in ("addresses", "part_words", "pages", "blocks")}
for to_store in (False, True):
    constants = {"TO_STORE": to_store, "CHUNK": 1024}
    types = {one: "constexpr" if one in constants else pointers.get(one, "i64") for one in kernel.arg_names}
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    compiled = triton.compile(ASTSource(kernel, types, constants), target=target, options={"num_warps": 8})
    assert compiled.asm["cubin"]
"""


def check(
    copies: type, words: tuple[int, ...], to_store: bool, layers: range, pages: list[int], device: str = "cpu"
) -> None:
    """Copy in one direction, and compare all memory with the expected bytes. `device`: of the pages."""
    torch.manual_seed(0)
    parts = [[torch.randint(0, 255, (6, 8 * n), dtype=torch.uint8).to(device) for n in words] for _ in range(3)]
    pool = SimpleNamespace(layer_num=3, page_parts=lambda layer: tuple(parts[layer]))
    geometry = StoreGeometry.of_pool(pool)
    memory = torch.randint(0, 255, (7, geometry.block_bytes), dtype=torch.uint8)
    if device == "cuda":
        memory = memory.pin_memory()
    want_parts, want_memory = [[part.clone() for part in layer] for layer in parts], memory.clone()
    blocks = list(range(6, 6 - len(pages), -1))
    for layer in layers:
        for index, (begin, size) in enumerate(zip(geometry.part_offsets, geometry.part_bytes, strict=True)):
            at = slice(layer * geometry.layer_bytes + begin, layer * geometry.layer_bytes + begin + size)
            if to_store:
                want_memory[blocks, at] = parts[layer][index][pages].cpu()
            else:
                want_parts[layer][index][pages] = memory[blocks, at].to(device)
    copies(parts, memory, geometry)(to_store, layers, torch.tensor(pages), torch.tensor(blocks))
    if device == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(memory, want_memory)
    assert all(
        torch.equal(*pair) for one, two in zip(parts, want_parts, strict=True) for pair in zip(one, two, strict=True)
    )


def test_programs_have_just_enough_bytes_in_flight_to_fill_the_link() -> None:
    in_flight = 8 * 1024
    assert COPY_PROGRAMS == 16
    assert programs_to_fill(64e9, 2e-6) * in_flight >= 64e9 * 2e-6 > (COPY_PROGRAMS - 1) * in_flight
    assert programs_to_fill(450e9, 1.3e-6) == 72, "a link seven times as fast takes more of the GPU"


CASES = [
    (words, to_store, layers, pages)
    for words in WIDTHS.values()
    for to_store in (True, False)
    for layers, pages in ((range(3), [4, 0, 2]), (range(1, 2), [5]), (range(3), []))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_copies_page_by_page_change_only_their_targets(case) -> None:
    check(PerPageCopy, *case)


def test_the_fused_kernel_changes_only_its_targets() -> None:
    program = "import test_page_copies as t; [t.check(t.FusedPageCopy, *case) for case in t.CASES]; print(len(t.CASES))"
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **INTERPRETED, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == str(len(CASES))


@pytest.mark.parametrize("capability", ["80", "90"])
def test_the_kernel_compiles_for_gpus(capability: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", COMPILING, capability], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(("part_bytes", "serves"), [((16, 64), True), ((16, 4), False)])
def test_the_kernel_takes_whole_words_only(part_bytes, serves) -> None:
    assert FusedPageCopy.serves(StoreGeometry(num_layers=1, part_bytes=part_bytes)) is serves
