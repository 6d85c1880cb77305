"""Prepares this process for SGLang's own classes, which some tests of this directory build themselves."""

from __future__ import annotations

from sgl_batch.sglang_adapter import bootstrap

bootstrap.prepare()
