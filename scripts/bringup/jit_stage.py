"""Owns the stage that runs each of our Triton kernels once on the GPU, and reports the compilation time."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Compare experts with torch's, and copy pages to the host and back."""
    import torch

    from sgl_batch.layers.moe.expert_runner import create_expert_runner

    dtype = getattr(torch, spec["dtype"])
    torch.manual_seed(0)
    x, w13, w2 = (
        torch.randn(*shape, device="cuda").mul(0.1).to(dtype) for shape in ((64, 128), (8, 192, 128), (8, 128, 96))
    )
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(64)]).to("cuda", torch.int32)
    weights = torch.rand(64, 2, device="cuda")
    begun = time.perf_counter()
    found, _ = create_expert_runner("triton")(x, w13, w2, weights, ids, f32_output=True)
    torch.cuda.synchronize()
    took = time.perf_counter() - begun
    wanted, _ = create_expert_runner("torch")(x, w13, w2, weights, ids, f32_output=True)
    apart = float((found - wanted).norm() / wanted.norm())
    result: dict[str, Any] = {"remark": f"experts compiled in {took:.1f} s, {apart:.4f} from torch's"}
    if not apart < 0.02:
        result["error"] = f"experts are {apart:.4f} from torch's, not below 0.02"
    return result


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from bringup.stage_result import answer

    answer(run)
