"""Owns the refusal of attention windows that SGLang's model of a family leaves out. Those that it has are its own."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_batch.errors import ConfigError
from sgl_batch.model_executor.families import FAMILIES


def check_window(architectures: Sequence[str], config: object, context_length: int) -> None:
    """Raise ConfigError where a sequence may become longer than the window that its tokens attend to.

    `config`: of the text model, as transformers reads it. Up to the window's length attention is the same without one.
    """
    window = window_of(config)
    if window is None or context_length <= window:
        return
    for family in FAMILIES:
        name = next((name for name in architectures if name in family.architectures), None)
        if name is not None and not family.windowed:
            raise ConfigError(
                f"a token of this {name} attends to the last {window} tokens (sliding_window in its config.json), and "
                f"SGLang's model to the whole context, which may be of {context_length} tokens: its answers would "
                f"differ beyond the window; give --context-length {window}"
            )


def window_of(config: object) -> int | None:
    """How many tokens back attention reaches in some layer; None: to the first."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not window or getattr(config, "use_sliding_window", None) is False:
        return None
    return None if kinds and "sliding_attention" not in kinds else window
