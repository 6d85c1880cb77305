"""Owns which architectures and quantised weights SGLang can run, read from its source: importing it takes seconds."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

_MODELS = ("srt", "models")
# The name under which a model's file lists its classes.
_OFFERED = "EntryClass"
_QUANTIZATIONS = (("srt", "layers", "quantization", "__init__.py"), ("srt", "configs", "model_config.py"))
# SGLang runs the models of transformers through transformers.
_TRANSFORMERS_MODELS = ("models", "auto", "modeling_auto.py")


def is_known_architecture(name: str) -> bool:
    """Return whether SGLang or transformers has a model of this name; True if that cannot be known."""
    transformers = _package("transformers")
    if transformers is None or has_own_model(name):
        return True
    return f'"{name}"' in transformers.joinpath(*_TRANSFORMERS_MODELS).read_text(encoding="utf-8")


def has_own_model(name: str) -> bool:
    """Return whether SGLang itself has a model of this name; True if that cannot be known."""
    sglang = _package("sglang")
    if sglang is None or os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):
        return True
    word = re.compile(rf"\b{re.escape(name)}\b")
    for path in sglang.joinpath(*_MODELS).glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if name in text and word.search(text, max(text.rfind(_OFFERED), 0)):
            return True
    return False


def is_known_quantization(name: str) -> bool:
    """Return whether SGLang reads weights that are quantised by this method; True if that cannot be known."""
    sglang = _package("sglang")
    if sglang is None:
        return True
    return any(f'"{name.lower()}"' in sglang.joinpath(*path).read_text(encoding="utf-8") for path in _QUANTIZATIONS)


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None
