"""Owns the refusal of attention windows at loading, for models whose config could not be read before the start.

core/model_refusals decides what a window is and which adapters cover one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sgl_batch.core.model_refusals import JudgedConfig, covers_windows, window_of
from sgl_batch.core.supported_models import has_adapter
from sgl_batch.errors import ConfigError


class TextConfig(Protocol):
    """The text model's config, as transformers reads it."""

    def to_dict(self) -> Mapping[str, object]:
        """Return all fields by name."""


def check_window(architectures: Sequence[str], config: TextConfig, context_length: int) -> None:
    """Raise ConfigError if a sequence may become longer than the window that its tokens attend to.

    Up to the window's length, attention is the same with and without a window.
    """
    name = next(filter(has_adapter, architectures), None)
    if name is None:
        return
    judged = JudgedConfig(architecture=name, whole=config.to_dict(), device=None, context=context_length)
    window = window_of(judged)
    if window is None or context_length <= window or covers_windows(judged):
        return
    raise ConfigError(
        f"a token of this {name} attends to the last {window} tokens (sliding_window in its config.json), and "
        f"SGLang's model to the whole context, which may be of {context_length} tokens: its answers would "
        f"differ beyond the window; give --context-length {window}"
    )
