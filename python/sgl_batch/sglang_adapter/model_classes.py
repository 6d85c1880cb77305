"""Owns importing SGLang's model classes: all of them, which takes a second. SGLang chooses the one of a model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from sgl_batch.sglang_adapter import bootstrap

_REGISTRY = "sglang.srt.models.registry"


def import_model_classes() -> None:
    """Import all model classes on a CPU, as the rest of SGLang: without its compiler. Idempotent.

    SGLang's warnings are not logged: it warns of each model whose packages are not installed, whatever model runs.
    """
    with bootstrap.importing(), _only_errors():
        import sglang.srt.models.registry  # noqa: F401


@contextmanager
def _only_errors() -> Iterator[None]:
    logger = logging.getLogger(_REGISTRY)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
