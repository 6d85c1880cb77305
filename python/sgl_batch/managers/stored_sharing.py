"""Owns which choices of one request still read the prompt that their leader computed, where its KV lies in the store.

The slots themselves are shared by reference count; their account is let go with the last reader.
"""

from __future__ import annotations


class StoredSharing:
    """Readers of shared prompts, by prompt group; what `PromptSharing` is to pages of the device."""

    def __init__(self) -> None:
        self._readers: dict[str, set[str]] = {}

    def begin(self, group: str, readers: set[str]) -> None:
        """These sequences, the leader among them, have the group's prompt."""
        self._readers[group] = readers

    def leave(self, group: str, request_id: str) -> bool:
        """A choice has finished. Returns whether it was the last that read the group's prompt."""
        readers = self._readers.get(group)
        if readers is None or request_id not in readers:
            return False
        readers.remove(request_id)
        if readers:
            return False
        del self._readers[group]
        return True
