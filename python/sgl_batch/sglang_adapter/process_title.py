"""Owns that the titles of SGLang's processes (`sglang::scheduler`, ...) can be set, as ps and top show them."""

from __future__ import annotations

import setproctitle


def find_title() -> None:
    """Find where this process's title lies. Call it before environment variables change. Idempotent.

    The title is found by the first variable that lies behind it. After that variable has changed, setting the title of
    this process or of a forked child does nothing, unless the title was found before.
    """
    setproctitle.getproctitle()
