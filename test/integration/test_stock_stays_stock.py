"""SGLang started without sgl_batch, in the same environment, runs only its own classes."""

from __future__ import annotations

import json
import subprocess
import sys

PLAIN_SGLANG = """
import json, sys
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms(Tensor a, Tensor b, float c) -> Tensor", "qnms(Tensor a, Tensor b, float c) -> Tensor"):
    try:
        library.define(name)
    except RuntimeError:
        pass
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.platforms import current_platform
import sglang.srt.managers.scheduler as scheduler
import sglang.srt.mem_cache.allocation as allocation
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
print(json.dumps({
    "platform": type(current_platform).__module__,
    "scheduler": scheduler.Scheduler.__module__,
    "triton": allocation.support_triton("sgl_batch_cpu"),
    "function": Engine.run_scheduler_process_func.__module__,
    "backends": [name for name in ATTENTION_BACKENDS if "batch" in name],
    "ours": sorted(name for name in sys.modules if name.startswith("sgl_batch")),
}))
"""


def test_plain_sglang_loads_none_of_our_classes() -> None:
    done = subprocess.run([sys.executable, "-c", PLAIN_SGLANG], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["platform"].startswith("sglang.")
    assert seen["scheduler"] == "sglang.srt.managers.scheduler"
    assert seen["function"] == "sglang.srt.managers.scheduler"
    assert seen["triton"] is True, "SGLang's own answer for a backend that it does not know"
    assert seen["backends"] == []
    allowed = {
        "sgl_batch",
        "sgl_batch.sglang_adapter",
        "sgl_batch.sglang_adapter.names",
        "sgl_batch.sglang_adapter.platform_entry",
    }
    assert set(seen["ours"]) <= allowed, "only the entry points that decline are imported"
