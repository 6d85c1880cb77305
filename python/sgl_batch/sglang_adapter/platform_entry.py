"""Owns the entry points in `sglang.srt.platforms`, which activate our platforms in our own processes only.

SGLang calls every installed entry point when it looks for a platform. Ours return None unless SGLANG_PLATFORM names
their platform, so that stock SGLang in the same environment stays stock.
"""

from __future__ import annotations

import os

from sgl_batch.sglang_adapter.names import CPU_PLATFORM, STOCK_CPU_PLATFORM


def activate() -> str | None:
    """Return the class path of our CPU platform, if this process was started for it."""
    if os.environ.get("SGLANG_PLATFORM") != CPU_PLATFORM:
        return None
    return "sgl_batch.managers.cpu_platform.BatchCpuPlatform"


def activate_stock() -> str | None:
    """Return the class path of the platform with which stock SGLang starts on a CPU, if this process is for it."""
    if os.environ.get("SGLANG_PLATFORM") != STOCK_CPU_PLATFORM:
        return None
    return "sgl_batch.sglang_adapter.stock_cpu_platform.StockCpuPlatform"
