"""Adapts SGLang's search for stop_regex: it takes limited time, so that no pattern delays the steps of all sequences.

A pattern such as (a+)+$ takes time that doubles with each letter of some texts, and SGLang searches in the middle of a
step. A pattern that takes too long ends its own request with an error.
"""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus
from typing import Any

import regex

from sgl_batch.sglang_adapter import bootstrap

with bootstrap.importing():
    import sglang.srt.managers.schedule_batch as schedule_batch_module
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

SEARCH_S = 0.1


class _PatternError(Exception):
    """A pattern that cannot be searched for."""


class LimitedSearch:
    """Replaces the module `re`, of which SGLang uses `search` only."""

    @staticmethod
    def search(pattern: str, text: str) -> Any:
        """Return the first match, or None. Raises _PatternError after SEARCH_S."""
        try:
            return _compiled(pattern).search(text, timeout=SEARCH_S)
        except TimeoutError as error:
            shown = f"the search for stop_regex {pattern[:80]!r} takes more than {SEARCH_S:g} s"
            raise _PatternError(f"{shown}; write a pattern without nested repetitions") from error
        except regex.error as error:
            raise _PatternError(f"stop_regex {pattern[:80]!r} cannot be searched for: {error}") from error


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern)


def limit_stop_patterns() -> None:
    """Let SGLang, in this process, search for patterns in limited time."""
    check = Req._check_str_based_finish

    def limited(self: Any, new_accepted_len: int = 1) -> bool:
        try:
            return bool(check(self, new_accepted_len))
        except _PatternError as error:
            self.finished_reason = FINISH_ABORT(str(error), HTTPStatus.BAD_REQUEST, "BadRequestError")
            self.finished_len = len(self.output_ids)
            return True

    schedule_batch_module.re = LimitedSearch
    Req._check_str_based_finish = limited
