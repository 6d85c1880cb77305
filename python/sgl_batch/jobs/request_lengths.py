"""Estimates how long the prompt and the output of a request are, from its body. Outputs count with their limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sgl_batch.planner.workload import DEFAULT_OUTPUT, Request

_BYTES_A_TOKEN = 4
_MESSAGE_TOKENS = 4  # of a chat template, for each message
# Where a line has no limit: that of /v1/completions, and for a chat, which has none, the planner's usual output.
_COMPLETION_OUTPUT = 16
_MOST_CHOICES = 128
TextTokens = Callable[[str], int]


def by_bytes(text: str) -> int:
    """Return a token for every four bytes of text."""
    return -(-len(text.encode("utf-8", "replace")) // _BYTES_A_TOKEN)


class RequestLengths:
    """Reads lengths from requests. `tokens`: counts the tokens of a text."""

    def __init__(self, tokens: TextTokens = by_bytes) -> None:
        self._tokens = tokens

    def requests(self, body: Any) -> list[Request]:
        """Return a request for each choice that a body asks for; nothing for a body that cannot be read."""
        try:
            is_chat = "messages" in body
            prompt = sum(map(self._of_message, body["messages"])) if is_chat else self._of_prompt(body["prompt"])
            asked = body.get("max_completion_tokens") or body.get("max_tokens")
            output = int(asked or (DEFAULT_OUTPUT if is_chat else _COMPLETION_OUTPUT))
            return [Request(max(prompt, 1), max(output, 1))] * min(max(int(body.get("n") or 1), 1), _MOST_CHOICES)
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError, RecursionError):
            return []

    def _of_message(self, message: Mapping[str, Any]) -> int:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else [str(part.get("text") or "") for part in content]
        return _MESSAGE_TOKENS + sum(map(self._tokens, parts))

    def _of_prompt(self, prompt: Any) -> int:
        """Return the tokens of a text, of a list of token ids, or of a list of either."""
        if isinstance(prompt, str):
            return self._tokens(prompt)
        if not isinstance(prompt, list):
            raise TypeError(f"a prompt is a text or a list, not {type(prompt).__name__}")
        return sum(1 if isinstance(part, int) else self._of_prompt(part) for part in prompt)
