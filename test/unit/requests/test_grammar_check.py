"""A grammar that cannot be compiled in time, or allows no first token, is refused. A real process compiles it, once."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import xgrammar

from sgl_batch.managers.tokenizer_manager import BatchTokenizerManager
from sgl_batch.requests.grammar_check import MAX_GRAMMAR_BYTES, CompileProcess, GrammarCheck, refuse_grammars
from sgl_batch.sglang_adapter import bootstrap
from sgl_batch.sglang_adapter.grammars import Compilation
from sgl_batch.sglang_adapter.refusals import RefusalError

with bootstrap.importing():
    from sglang.srt.managers.io_struct import GenerateReqInput

WORDS = ["</s>", *(chr(code) for code in range(32, 127)), "true", "false"]
DEEP = '{"items":' * 20_000 + "{}" + "}" * 20_000
TAG = {"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}


@pytest.fixture(scope="module")
def process() -> Iterator[CompileProcess]:
    info = xgrammar.TokenizerInfo(WORDS, vocab_size=len(WORDS), stop_token_ids=[0])
    process = CompileProcess(info.serialize_json, cpu_s=1.0)
    yield process
    process.close()


def faults(process: CompileProcess, *grammars: dict[str, str]) -> list[tuple[str | None, str]]:
    """The field at fault and the message for each set of sampling parameters, in order; ("", "") if none."""

    async def one(check: GrammarCheck, parameters: dict[str, str]) -> tuple[str | None, str]:
        try:
            await check.check(parameters)
        except RefusalError as refused:
            return (
                (refused.param, str(refused)) if refused.code == "invalid_grammar" else ("another code", refused.code)
            )
        return "", ""

    async def all_of() -> list[tuple[str | None, str]]:
        check = GrammarCheck(process.fault, any_whitespace=True)
        return [await one(check, parameters) for parameters in grammars]

    return asyncio.run(all_of())


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"$ref": "#"}', "allows no first token"),
        ("json_schema", "{", "Failed to parse JSON"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum greater than maximum"),
        ("ebnf", "root ::= root", "allows no first token"),
        ("ebnf", "root ::= a\na ::= b\nb ::= a", "allows no first token"),
        ("ebnf", "", "root rule"),
        ("ebnf", "(" * 100_000, "EBNF"),
        ("regex", "(", "parenthesis is not closed"),
        ("regex", "\ud800", "surrogates"),
        ("structural_tag", "[", "Expecting value"),
        ("structural_tag", "{}", "not have the expected form"),
        ("structural_tag", '{"structures": [{"begin": "<a>"}], "triggers": ["<a>"]}', "KeyError"),
        ("json_schema", '"' + "x" * MAX_GRAMMAR_BYTES, "the limit is 1,048,576"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_with_the_reason(
    process: CompileProcess, kind: str, text: str, words: str
) -> None:
    [(param, message)] = faults(process, {kind: text})
    assert param == kind
    assert words in message
    assert "/project/" not in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "boolean"}'),
        ("json_schema", "$$ANY$$"),
        ("regex", "(a{1,1000}){1,1000}"),
        ("ebnf", 'root ::= root "a" | "a"'),
        ("structural_tag", json.dumps({"structures": [TAG], "triggers": ["<a>"]})),
    ],
)
def test_a_grammar_that_can_be_used_passes(process: CompileProcess, kind: str, text: str) -> None:
    assert faults(process, {kind: text}) == [("", "")]


def test_a_grammar_that_takes_too_long_ends_the_process_and_a_new_one_checks_the_next(process: CompileProcess) -> None:
    before = process.pid
    deep, good = faults(process, {"json_schema": DEEP}, {"regex": "a+"})
    assert "more than 1 s of processor time or 1024 MiB" in deep[1]
    assert good == ("", "")
    after = process.pid
    assert after is not None
    assert after != before
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(after, 0)


def test_a_grammar_of_many_requests_is_compiled_once() -> None:
    asked: list[Compilation] = []

    async def compile_fault(one: Compilation) -> str | None:
        asked.append(one)
        await asyncio.sleep(0)
        return None

    async def scenario() -> None:
        check = GrammarCheck(compile_fault, any_whitespace=False)
        await asyncio.gather(*(check.check({"regex": "a"}) for _ in range(50)))
        await check.check([{"regex": "a"}, {"json_schema": "{}"}, {}])
        await check.check(None)
        await check.check({"regex": 5})  # no text: checked elsewhere

    asyncio.run(scenario())
    assert [one.method for one in asked] == ["compile_regex", "compile_json_schema"]
    assert asked[1].arguments == {"schema": "{}", "any_whitespace": False}


def test_a_cancelled_request_does_not_cancel_the_check_of_others() -> None:
    async def scenario() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def compile_fault(_: Compilation) -> str | None:
            begun.set()
            await go_on.wait()
            return "bad"

        check = GrammarCheck(compile_fault, any_whitespace=True)
        first, second = (asyncio.ensure_future(check.check({"regex": "a"})) for _ in range(2))
        await begun.wait()
        first.cancel()
        await asyncio.wait({first})
        go_on.set()
        with pytest.raises(RefusalError, match="bad"):
            await second

    asyncio.run(scenario())


def test_without_a_grammar_backend_every_grammar_is_refused_with_the_remedy():
    manager = BatchTokenizerManager.__new__(BatchTokenizerManager)
    manager.server_args, manager.mm_processor = SimpleNamespace(grammar_backend="none"), None
    for kind, text in (("json_schema", "{}"), ("regex", "a"), ("ebnf", "root ::= 'a'"), ("structural_tag", "{}")):
        request = GenerateReqInput(text="a", sampling_params={kind: text})
        with pytest.raises(RefusalError, match=r"takes no grammars: .* install xgrammar and start it anew") as refused:
            asyncio.run(anext(manager.generate_request(request)))
        assert (refused.value.param, refused.value.code) == (kind, "invalid_grammar")
    refuse_grammars({"temperature": 0.0})
