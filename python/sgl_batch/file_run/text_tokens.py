"""Estimates how many tokens texts have, by the model's tokenizer file where it is at hand."""

from __future__ import annotations

import logging
from pathlib import Path

from sgl_batch.jobs.request_lengths import TextTokens

logger = logging.getLogger(__name__)

# So much of a text is cut into tokens; the rest counts in proportion, so that a sample of long texts is soon counted.
_MOST_CHARACTERS = 2048


def by_tokenizer(model: Path | None) -> TextTokens | None:
    """Return what counts tokens with the tokenizer of a model's directory; None where it has no tokenizer.json.

    It adds no special tokens. The file of a large vocabulary takes half a second to load.
    """
    file = None if model is None else model / "tokenizer.json"
    if file is None or not file.is_file():
        return None
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises no class of its own; the engine says what is wrong
        logger.debug("tokens are estimated by bytes, as %s cannot be loaded: %s", file, error)
        return None

    def count(text: str) -> int:
        # One text at a time: several would start threads, and the engine's processes are forked from this one.
        some = text[:_MOST_CHARACTERS]
        found = len(tokenizer.encode(some.encode("utf-8", "replace").decode(), add_special_tokens=False).ids)
        return -(-found * len(text) // max(len(some), 1))

    return count
