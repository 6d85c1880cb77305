"""Adapts SGLang's grammars: what xgrammar compiles for a request, and how the scheduler ends a request that fails.

We compile grammars in another process before a request is accepted, so we need SGLang's call of the compiler as data.
SGLang ends a request whose grammar cannot continue without a reason; ours gives the reason.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.names import CPU_GRAMMAR
from sgl_batch.sglang_adapter.types.messages import EndReason

with bootstrap.importing():
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from xgrammar import TokenizerInfo

GRAMMAR_KINDS = ("json_schema", "regex", "ebnf", "structural_tag")
INVALID_GRAMMAR = "invalid_grammar"
# How SGLang's messages begin for a grammar that its backend refuses.
_BACKEND_WORDS = ("Failed to compile ", "Grammar preprocessing timed out", "Grammar-based generation ")
_DISPATCH = {"json_schema": "dispatch_json", "regex": "dispatch_regex", "ebnf": "dispatch_ebnf"}
_FOREVER = 1 << 60
# The bytes of compiled grammars that are kept; a grammar without a size counts as _SOME_BYTES.
_KEPT_BYTES, _SOME_BYTES = 512 << 20, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """A call of xgrammar's compiler: its method and keyword arguments, all of them JSON values."""

    method: str
    arguments: dict[str, Any]


class _NotedError(Exception):
    """A call of the compiler that was noted instead of made."""


class _NotingCompiler:
    def compile_builtin_json_grammar(self) -> None:
        raise _NotedError("compile_builtin_json_grammar", {})

    def compile_json_schema(self, **arguments: Any) -> None:
        raise _NotedError("compile_json_schema", arguments)

    def compile_regex(self, regex: str) -> None:
        raise _NotedError("compile_regex", {"regex": regex})

    def compile_grammar(self, grammar: str) -> None:
        raise _NotedError("compile_grammar", {"grammar": grammar})

    def compile_structural_tag(self, tag: Any) -> None:
        text = tag if isinstance(tag, str) else tag.model_dump_json()
        raise _NotedError("compile_structural_tag", {"structural_tag": text})


def compilation(kind: str, text: str, *, any_whitespace: bool) -> Compilation:
    """Return the call of xgrammar's compiler that SGLang makes for a grammar. Raises ValueError if it makes none."""
    backend = XGrammarGrammarBackend.__new__(XGrammarGrammarBackend)
    backend.grammar_compiler, backend.any_whitespace = _NotingCompiler(), any_whitespace
    try:
        refused = getattr(backend, _DISPATCH.get(kind, "dispatch_structural_tag"))(text)
    except _NotedError as noted:
        return Compilation(method=noted.args[0], arguments=noted.args[1])
    except (AssertionError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"it does not have the expected form: {type(error).__name__}: {error}") from error
    assert isinstance(refused, InvalidGrammarObject), "nothing was compiled"
    raise ValueError(refused.error_message)


def compiles_with_xgrammar(server_args: Any) -> bool:
    """Return whether the schedulers of an engine compile grammars with xgrammar."""
    return server_args.grammar_backend in ("xgrammar", CPU_GRAMMAR)


def tokenizer_info(tokenizer: Any, vocab_size: int, stop_token_ids: Any) -> str:
    """Return xgrammar's description of a tokenizer as JSON.

    Raises ValueError or RuntimeError for a tokenizer that it does not support.
    """
    if hasattr(tokenizer, "init_xgrammar"):
        info, _ = tokenizer.init_xgrammar()
        if info is None:
            raise ValueError(f"xgrammar does not support {type(tokenizer).__name__}")
    else:
        stops = list(stop_token_ids) if stop_token_ids else None
        info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stops)
    return str(info.serialize_json())


class _ResultProcessor(SchedulerBatchResultProcessor):  # type: ignore[misc]
    """SGLang's result processor, which gives a reason when it ends a request whose grammar allows no further token."""

    __slots__ = ()

    def _apply_prefill_grammar(self, *, req: Any, next_token_id: int) -> None:
        before = req.to_finish
        super()._apply_prefill_grammar(req=req, next_token_id=next_token_id)
        _say_why(req, before)

    def _accept_grammar_tokens(self, req: Any, tokens: Any) -> Any:
        before = req.to_finish
        retained = super()._accept_grammar_tokens(req, tokens)
        _say_why(req, before)
        return retained


def _say_why(request: Any, before: Any) -> None:
    """Set the reason of a request that SGLang has ended: its grammar refused the token, as it allows none."""
    if request.to_finish is not before:
        so_far = len(request.output_ids) - 1
        message = f"its grammar allows no token after the {so_far} generated ones, and may not end there"
        request.to_finish = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, INVALID_GRAMMAR)


def report_grammar_failures(scheduler: Any) -> None:
    """Let a scheduler answer a request whose grammar cannot continue with the reason, as the request's own fault."""
    own = scheduler.batch_result_processor
    fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    scheduler.batch_result_processor = _ResultProcessor(**fields)


def limit_grammars(scheduler: Any) -> None:
    """Let a scheduler keep compiled grammars in limited memory, and wait without a limit for each compilation.

    Each grammar was compiled in limited time before: one that waits long waits for other compilations.
    """
    manager = scheduler.grammar_manager
    manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS = _FOREVER
    backend = manager.grammar_backend
    if backend is not None:
        compiler = getattr(getattr(backend, "grammar_backend", backend), "grammar_compiler", None)
        backend.cache = KeptGrammars(_KEPT_BYTES, getattr(compiler, "clear_cache", lambda: None))


class KeptGrammars(OrderedDict[tuple[str, str], Any]):
    """Compiled grammars by kind and text. When they exceed `max_bytes`, the oldest are dropped and `on_drop` is called.

    The newest stays, whatever its size.
    """

    def __init__(self, max_bytes: int, on_drop: Callable[[], None]) -> None:
        super().__init__()
        self._max_bytes, self._on_drop = max_bytes, on_drop

    def __setitem__(self, key: tuple[str, str], grammar: Any) -> None:
        super().__setitem__(key, grammar)
        if len(self) > 1 and sum(map(_bytes_of, self.values())) > self._max_bytes:
            while len(self) > 1 and sum(map(_bytes_of, self.values())) > self._max_bytes // 2:
                self.popitem(last=False)
            self._on_drop()


def _bytes_of(grammar: Any) -> int:
    compiled = getattr(getattr(grammar, "grammar", None) or grammar, "ctx", None)
    return int(getattr(compiled, "memory_size_bytes", _SOME_BYTES))


def is_grammar_failure(finish_reason: EndReason) -> bool:
    """Return whether a request was ended because of its grammar."""
    message = finish_reason.get("message") or ""
    return finish_reason.get("err_type") == INVALID_GRAMMAR or message.startswith(_BACKEND_WORDS)
