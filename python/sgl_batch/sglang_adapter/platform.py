"""Exports SGLang's platform classes, from which our platforms derive."""

from __future__ import annotations

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    from sglang.srt.platforms.cpu import CpuSRTPlatform
    from sglang.srt.platforms.interface import PlatformEnum

__all__ = ["CpuSRTPlatform", "PlatformEnum"]
