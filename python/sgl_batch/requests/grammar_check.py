"""Decides which grammars a scheduler may compile: those that a separate process compiles in limited time and memory.

A scheduler compiles in a thread that cannot be stopped, in the process that runs all sequences.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

from sgl_batch.sglang_adapter.grammars import GRAMMAR_KINDS, INVALID_GRAMMAR, Compilation, compilation
from sgl_batch.sglang_adapter.refusals import RefusalError

MAX_GRAMMAR_BYTES = 1 << 20
COMPILE_CPU_S = 10.0
COMPILE_WALL_S = 120.0  # for a machine whose processors are all busy
COMPILE_MEMORY_BYTES = 1 << 30
_MAX_KNOWN = 4096
_PROGRAM = (sys.executable, "-m", "sgl_batch.requests.grammar_worker")


class CompileProcess:
    """The process that compiles grammars. It starts with the first grammar, and again after a grammar has ended it."""

    def __init__(self, tokenizer: Callable[[], str], *, cpu_s: float = COMPILE_CPU_S) -> None:
        self._tokenizer, self._cpu_s = tokenizer, cpu_s
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, "grammar-check")

    async def fault(self, asked: Compilation) -> str | None:
        """Return why a grammar cannot be used, or None. Grammars are compiled one after another."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._fault, asked)

    def _fault(self, asked: Compilation) -> str | None:
        process = self._process or self._start()
        answer = _ask(process, {"method": asked.method, "arguments": asked.arguments})
        if answer is not None:
            fault = answer["fault"]
            assert fault is None or isinstance(fault, str), "grammar_worker answers with a text or null"
            return fault
        _end(process)
        self._process = None
        return (
            f"compiling it takes more than {self._cpu_s:g} s of processor time or "
            f"{COMPILE_MEMORY_BYTES >> 20} MiB; make it smaller"
        )

    @property
    def pid(self) -> int | None:
        """The id of the process that compiles now, or None."""
        return None if self._process is None else self._process.pid

    def _start(self) -> subprocess.Popen[str]:
        assert not self._is_closed, "nothing is compiled after close()"
        limits = {"cpu_s": self._cpu_s, "wall_s": COMPILE_WALL_S, "memory_bytes": COMPILE_MEMORY_BYTES}
        process = subprocess.Popen(_PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if _ask(process, {"tokenizer": self._tokenizer(), **limits}) is None:
            raise RuntimeError(f"the process that checks grammars did not start; it ended with {process.wait()}")
        self._process = process
        return process

    def close(self) -> None:
        """End the process, whatever it compiles. Idempotent."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()  # this ends the thread's wait
        self._thread.shutdown(cancel_futures=True)
        if self._process is not None:
            _end(self._process)
            self._process = None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None, "the process was started with pipes"
        pipe.close()


def _ask(process: subprocess.Popen[str], message: Mapping[str, object]) -> dict[str, object] | None:
    """Return the answer to `message`, or None where the process has ended."""
    assert process.stdin is not None, "the process was started with a pipe"
    assert process.stdout is not None, "the process was started with a pipe"
    try:
        process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    line = process.stdout.readline()
    answer: dict[str, object] | None = json.loads(line) if line else None
    return answer


class GrammarCheck:
    """Remembers for each grammar whether it can be used. `compile_fault` finds that out for a new one."""

    def __init__(self, compile_fault: Callable[[Compilation], Awaitable[str | None]], *, any_whitespace: bool) -> None:
        self._compile_fault, self._any_whitespace = compile_fault, any_whitespace
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._finding: dict[bytes, asyncio.Task[str | None]] = {}

    async def check(self, sampling_params: object) -> None:
        """Raise RefusalError for a grammar in a request's sampling parameters that cannot be used."""
        for kind, text in _grammars(sampling_params):
            fault = await self._fault(kind, text)
            if fault is not None:
                raise RefusalError(f"the grammar cannot be used: {fault}", code=INVALID_GRAMMAR, param=kind)

    async def _fault(self, kind: str, text: str) -> str | None:
        if len(text) > MAX_GRAMMAR_BYTES:
            return f"it has {len(text):,} characters and the limit is {MAX_GRAMMAR_BYTES:,}"
        key = blake2b(f"{kind} {text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if key not in self._finding:
            self._finding[key] = asyncio.ensure_future(self._find(kind, text))
            self._finding[key].add_done_callback(lambda _: self._finding.pop(key))
        # Other requests may still wait for this grammar when this request is cancelled.
        fault = self._known[key] = await asyncio.shield(self._finding[key])
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return fault

    async def _find(self, kind: str, text: str) -> str | None:
        try:
            asked = compilation(kind, text, any_whitespace=self._any_whitespace)
        except ValueError as error:
            return str(error)
        return await self._compile_fault(asked)


def refuse_grammars(sampling_params: object) -> None:
    """Raise RefusalError for a grammar in a request's sampling parameters: this engine computes none."""
    for kind, _ in _grammars(sampling_params):
        raise RefusalError(
            "this engine takes no grammars: its grammar_backend is 'none', as it is without xgrammar; install xgrammar "
            "and start it anew, or leave the grammar out",
            code=INVALID_GRAMMAR,
            param=kind,
        )


def _grammars(sampling_params: object) -> Iterator[tuple[str, str]]:
    """Yield kind and text of the grammars in one or several sets of sampling parameters.

    A grammar that is no text is refused elsewhere.
    """
    for one in sampling_params if isinstance(sampling_params, list) else [sampling_params]:
        given = one if isinstance(one, Mapping) else {}
        for kind in GRAMMAR_KINDS:
            if isinstance(given.get(kind), str):
                yield kind, given[kind]
