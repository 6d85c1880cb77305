"""Adapts grammars for migration: a rank compiles the grammar of a request that arrives, and replays its tokens."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from sgl_batch.sglang_adapter.types.requests import Request
from sgl_batch.sglang_adapter.types.scheduler import SGLangScheduler

__all__ = ["ArrivingGrammars"]

# SGLang's names of the kinds of grammars in its cache, and the parameters that give their texts, in SGLang's order.
_KINDS = {"json": "json_schema", "regex": "regex", "ebnf": "ebnf", "structural_tag": "structural_tag"}


class ArrivingGrammars:
    """The grammars of requests that move to this rank. They are compiled in threads of SGLang's grammar backend."""

    def __init__(self, scheduler: SGLangScheduler) -> None:
        self._scheduler = scheduler
        self._compiling: dict[tuple[str, str], Future[Any]] = {}

    def give(self, request: Request) -> str | None:
        """Give a rebuilt request its grammar, in the state after its tokens; return why it cannot have it yet, or None.

        The first request with a grammar that this rank does not know begins to compile it, and has to come again.
        """
        manager: Any = self._scheduler.grammar_manager
        self._keep_compiled(manager)
        key = _key_of(request)
        if key is not None and (wait := self._awaits(manager, key, request)) is not None:
            return wait
        is_queued = manager.process_req_with_grammar(request)
        assert not is_queued, f"the grammar of {request.rid} is compiled"
        if request.to_finish is not None:
            return f"its grammar is refused there: {request.to_finish.to_json().get('message')}"
        return _replay(request)

    def _awaits(self, manager: Any, key: tuple[str, str], request: Any) -> str | None:
        if key not in self._compiling:
            grammar, is_known = manager.grammar_backend.get_cached_or_future_value(key, request.require_reasoning)
            if is_known:
                return None
            self._compiling[key] = grammar
        return "its grammar is being compiled there"

    def _keep_compiled(self, manager: Any) -> None:
        """Hand what is compiled to SGLang's cache. A grammar that failed is tried again with its next request."""
        for key, grammar in list(self._compiling.items()):
            if grammar.done():
                del self._compiling[key]
                if grammar.exception() is None:
                    manager.grammar_backend.set_cache(key, grammar.result().copy())


def _key_of(request: Any) -> tuple[str, str] | None:
    parameters = request.sampling_params
    texts = ((kind, getattr(parameters, name)) for kind, name in _KINDS.items())
    return next(((kind, text) for kind, text in texts if text is not None), None)


def _replay(request: Any) -> str | None:
    """Let the grammar accept the tokens so far, as it did on the rank that generated them."""
    if request.grammar is None:
        return None
    try:
        for token in request.output_ids:
            request.grammar.accept_token(token)
    except ValueError as error:
        return f"its grammar does not accept its tokens there: {str(error).splitlines()[0]}"
    return None
