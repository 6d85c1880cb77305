"""Ten thousand generated bad lines: each has one error of a known code or is left to the engine, and nothing stops."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bad_lines import URL, good_line, make_line, make_request
from hypothesis import example, given, settings
from hypothesis import strategies as st
from running_service import content, create, result_lines, service_in, until
from scripted_engines import ScriptedSource

from sgl_batch.engine.line_frames import pack_body, unpack_body
from sgl_batch.jobs.batch_service.validation import MAX_ERRORS, ValidationRules, validate_input
from sgl_batch.jobs.line_reader import RawLine
from sgl_batch.jobs.request_line import LineRules, RefusedLine, parse_request_line
from sgl_batch.jobs.result_lines import refused_result_line

EXAMPLES, LINES_EACH = 100, 100  # ten thousand lines
MAX_LINE_BYTES = 10_000
RULES = LineRules(served_model_names=("tiny",), max_line_bytes=MAX_LINE_BYTES)
CODES = {
    *("invalid_json_line", "line_not_an_object", "line_too_long", "missing_custom_id", "invalid_custom_id"),
    *("duplicate_custom_id", "missing_method", "invalid_method", "missing_url", "url_not_supported", "missing_body"),
    *("invalid_body", "missing_model", "model_mismatch", "missing_messages", "invalid_messages", "empty_messages"),
    *("missing_prompt", "invalid_prompt", "empty_prompt", "invalid_max_tokens", "invalid_n", "stream_not_supported"),
    *("invalid_number", "invalid_unicode"),
    *("remote_media_not_supported", "custom_logit_processor_not_supported", "invalid_max_completion_tokens"),
}
CODES_OF_JOBS = {
    *("invalid_json_line", "line_too_long", "missing_custom_id", "duplicate_custom_id", "missing_method"),
    *("url_mismatch", "missing_body", "model_mismatch"),
}


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1 << 32), extra=st.binary(max_size=80))
@example(seed=0, extra=b'{"custom_id": "\\ud800", "method": "POST"}')
def test_every_line_is_a_request_or_has_one_error_that_can_be_written(seed: int, extra: bytes) -> None:
    dice, seen = random.Random(seed), dict[str, int]()

    def claim(custom_id: str, number: int) -> int | None:
        custom_id.encode("utf-8")  # what is stored
        earlier = seen.setdefault(custom_id, number)
        return None if earlier == number else earlier

    for index, data in enumerate([extra.replace(b"\n", b""), *(make_line(dice) for _ in range(LINES_EACH - 1))]):
        kept = data if len(data) <= MAX_LINE_BYTES else None
        raw = RawLine(index=index, number=index + 1, data=kept, num_bytes=len(data))
        parsed = parse_request_line(raw, RULES, claim)
        if isinstance(parsed, RefusedLine):
            assert parsed.error.code in CODES, data
            assert parsed.error.status_code == 400, data
            result_line = refused_result_line("token", parsed.custom_id, index + 1, parsed.error)
            assert result_line.count(b"\n") == 1, data
            assert json.loads(result_line)["response"]["body"]["error"]["line"] == index + 1, data
        else:
            sent = json.loads(data)
            assert (parsed.custom_id, parsed.url) == (sent["custom_id"], sent["url"]), data
            assert parsed.body.items() >= {key: value for key, value in sent["body"].items() if key != "seed"}.items()
            assert unpack_body(pack_body(parsed.body)) == parsed.body, data


@settings(max_examples=EXAMPLES // 2, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 1 << 32))
def test_a_whole_file_of_bad_lines_is_validated_and_few_faults_are_named(tmp_path_factory, seed: int) -> None:
    dice = random.Random(seed)
    lines = [make_line(dice) for _ in range(2 * LINES_EACH)]
    directory = tmp_path_factory.mktemp("input")
    path = directory / "in.jsonl"
    path.write_bytes(b"\n".join(lines))
    rules = ValidationRules(endpoint=URL, served_model_names=("tiny",), max_lines=10**6, max_line_bytes=MAX_LINE_BYTES)
    found = validate_input(path, directory / "scratch", rules, threading.Event())
    numbers = [one.line for one in found.faults]
    assert 0 < len(numbers) <= MAX_ERRORS
    assert numbers == sorted(set(numbers)), "one fault for a line"
    assert {one.code for one in found.faults} <= CODES_OF_JOBS


def test_a_job_of_bad_lines_fails_as_a_whole_and_the_service_lives(tmp_path: Path) -> None:
    dice = random.Random(1)
    bad = b"\n".join(make_line(dice) for _ in range(EXAMPLES * LINES_EACH))

    async def scenario() -> None:
        async with service_in(tmp_path) as service:
            failed = await until(service, (await create(service, bad)).id, "failed")
            assert failed.status == "failed"
            assert failed.errors is not None
            assert len(failed.errors["data"]) == MAX_ERRORS
            json.dumps(failed.to_openai(), ensure_ascii=False).encode()
            done = await until(service, (await create(service, [good_line("a")])).id, "completed")
            assert done.request_counts == {"total": 1, "completed": 1, "failed": 0}

    asyncio.run(scenario())


def test_each_line_that_only_the_endpoint_can_judge_has_one_result_line(tmp_path: Path) -> None:
    dice = random.Random(2)
    lines = [make_request(dice, f"line {index}") for index in range(1000)]

    async def scenario() -> None:
        async with service_in(tmp_path) as service:
            job = await until(service, (await create(service, lines)).id, "completed")
            assert job.status == "completed", job.errors
            good, bad = await result_lines(service, job.output_file_id), await result_lines(service, job.error_file_id)
            assert Counter(one["custom_id"] for one in good + bad) == Counter(line["custom_id"] for line in lines)
            assert {one["response"]["body"]["error"]["code"] for one in bad} <= CODES
            assert {one["response"]["status_code"] for one in good} == {200}
            for file_id in (job.output_file_id, job.error_file_id):
                (await content(service, file_id)).decode("utf-8")

    asyncio.run(scenario())


def test_a_job_of_lenient_json_can_be_cancelled_and_continued(tmp_path: Path) -> None:
    digits = json.dumps(good_line("digits", seed="HERE")).encode().replace(b'"HERE"', b"9" * 5000)
    odd = [digits, json.dumps(good_line("nan", top_p=float("nan"))).encode(), b'{"custom_id": "\\ud83d"}']
    given = [good_line("first"), good_line("held", prompt="hold"), good_line("last")]
    first, held, last = (json.dumps(one).encode() for one in given)
    data = b"\n".join([first, held, *odd, last])

    async def hold(engine: Any, body: Mapping[str, object]) -> None:
        if body["prompt"] == "hold":
            await asyncio.Event().wait()

    async def scenario() -> None:
        async with service_in(tmp_path, ScriptedSource(hold), max_in_flight=1) as service:
            job = await create(service, data)
            while (await service.get_batch(job.id)).request_counts["completed"] == 0:
                await asyncio.sleep(0.001)
            await service.cancel_batch(job.id)
            cancelled = await until(service, job.id)
            errors = await result_lines(service, cancelled.error_file_id)
            assert [one["custom_id"] for one in errors] == ["held", "digits", "nan", None, "last"]
        async with service_in(tmp_path) as service:
            job = await service.create_batch({"continue_from": cancelled.id})
            done = await until(service, job.id)
            assert done.request_counts == {"total": 6, "completed": 3, "failed": 3}
            errors = await result_lines(service, done.error_file_id)
            assert [(one["custom_id"], one["response"]["body"]["error"]["code"]) for one in errors] == [
                *(("digits", "invalid_number"), ("nan", "invalid_number"), (None, "invalid_unicode")),
            ]

    asyncio.run(scenario())
