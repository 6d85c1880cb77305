"""SGLang's platform classes, for the platforms of ours that build on them."""

from __future__ import annotations

from sgl_batch.sglang_adapter import bootstrap

bootstrap.prepare()

from sglang.srt.platforms.cpu import CpuSRTPlatform  # noqa: E402
from sglang.srt.platforms.interface import PlatformEnum  # noqa: E402

__all__ = ["CpuSRTPlatform", "PlatformEnum"]
