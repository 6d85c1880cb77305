"""The program of a process that compiles grammars to see whether that ends in limited time and memory.

A compilation cannot be stopped within its process. This one reads requests from standard input and answers on standard
output, each one line of JSON. A grammar that takes too much time ends the process, and the parent starts another.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xgrammar import TokenizerInfo

# The time and source line with which the library's messages begin, and how much of a message is passed on.
_WHERE = re.compile(r"^\[[\d:]+\] \S+: ")
_MAX_CHARACTERS = 500
NO_TOKEN = "it allows no first token: no text can begin as it says"


def main() -> None:
    """Answer requests until standard input ends."""
    first = json.loads(sys.stdin.readline())
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(first["tokenizer"])
    _limit_memory(first["memory_bytes"])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _answer({"ready": True})
    # The library writes warnings about users' grammars to standard error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while line := sys.stdin.readline():
        asked = json.loads(line)
        # When a timer ends, the kernel ends the process. ITIMER_PROF counts processor time, ITIMER_REAL wall time.
        signal.setitimer(signal.ITIMER_PROF, first["cpu_s"])
        signal.setitimer(signal.ITIMER_REAL, first["wall_s"])
        fault = _fault(xgrammar, info, asked["method"], asked["arguments"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer({"fault": fault})


def _answer(message: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _fault(xgrammar: ModuleType, info: TokenizerInfo, method: str, arguments: Mapping[str, object]) -> str | None:
    """Return why a grammar cannot be used, or None."""
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    try:
        compiled = getattr(compiler, method)(**arguments)
        matcher = xgrammar.GrammarMatcher(compiled)
        mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
        matcher.fill_next_token_bitmask(mask)
    except MemoryError:
        return "compiling it takes too much memory"
    except (RuntimeError, ValueError, TypeError) as error:
        return _WHERE.sub("", str(error)).strip()[:_MAX_CHARACTERS]
    return None if mask.any() else NO_TOKEN


def _limit_memory(more_bytes: int) -> None:
    """Let this process take `more_bytes` more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack, which RLIMIT_DATA bounds
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


if __name__ == "__main__":
    main()
