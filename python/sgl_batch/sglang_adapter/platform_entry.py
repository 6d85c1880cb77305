"""The entry points under `sglang.srt.platforms`: they activate a platform only where we asked for it.

SGLang calls every installed entry point when it looks for a platform; ours answer None unless SGLANG_PLATFORM
names them, so that stock SGLang in the same environment stays stock.
"""

from __future__ import annotations

import os

from sgl_batch.sglang_adapter.names import CPU_PLATFORM, STOCK_CPU_PLATFORM


def activate() -> str | None:
    """Class path of our CPU platform, if this process was started for it."""
    if os.environ.get("SGLANG_PLATFORM") != CPU_PLATFORM:
        return None
    return "sgl_batch.managers.cpu_platform.BatchCpuPlatform"


def activate_stock() -> str | None:
    """Class path of the smallest platform with which SGLang's own classes start on a CPU."""
    if os.environ.get("SGLANG_PLATFORM") != STOCK_CPU_PLATFORM:
        return None
    return "sgl_batch.sglang_adapter.stock_cpu_platform.StockCpuPlatform"
