"""The Triton kernels compile for GPUs, also where there is none; the conformance suite tests their results."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sgl_batch.layers.moe import triton_kernels, triton_steps

POINTERS = {name: "*bf16" for name in ("x", "w13", "w2", "inter", "outputs", "gate_up", "out")}
POINTERS.update({name: "*fp32" for name in ("weights", "products", "bias")})
POINTERS.update({name: "fp32" for name in ("alpha", "limit")})
POINTERS.update({name: "*i32" for name in ("cell_row", "block_expert", "ids", "paths")})
gemm = {key: value for key, value in triton_steps._TILE.items() if key.isupper()} | {"WIDEN": False}
constants = {
    "gate_up_kernel": [gemm | {"CLAMPED": one} for one in (False, True)],
    "down_kernel": [gemm | {"BIASED": one} for one in (False, True)],
    "tree_sum_kernel": [{"C": 8, "N": triton_steps._COLUMNS}],
}
instructions = {}
for name, kernel in vars(triton_kernels).items():
    for own in constants.get(name, [triton_steps._ROW_TILE]) if isinstance(kernel, triton.JITFunction) else ():
        types = {one: "constexpr" if one in own else POINTERS.get(one, "i32") for one in kernel.arg_names}
        target = GPUTarget("cuda", int(sys.argv[1]), 32)
        compiled = triton.compile(ASTSource(kernel, types, own), target=target, options={"num_warps": 4})
        assert compiled.asm["cubin"]
        ptx = compiled.asm["ptx"]
        looked_for = ("wgmma", "mma.sync", "atom.global", "red.global")
        instructions.setdefault(name, set()).update(one for one in looked_for if one in ptx)
print(json.dumps({name: sorted(found) for name, found in instructions.items()}))
"""


@pytest.mark.parametrize(("capability", "product"), [("80", "mma.sync"), ("90", "wgmma")])
def test_the_kernels_compile_with_tensor_cores_and_without_atomics(capability, product, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, capability], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = ("gate_up", "down", "gather", "scatter", "silu_mul", "tree_sum")
    products = {"gate_up": [product], "down": [product]}

    assert json.loads(done.stdout) == {f"{name}_kernel": products.get(name, []) for name in names}
