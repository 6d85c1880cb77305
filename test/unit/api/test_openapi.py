"""The API follows its document: hostile values get a listed status in OpenAI's shape, and never cause a fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import aiohttp
import pytest
from fastapi import FastAPI
from files_client import LINE, Client, run
from yarl import URL

from sgl_batch.api.openapi import document, with_engine_operations

HOSTILE = (
    *(b"", b"0", b"-1", b"1e3", b"9" * 5000, b"\xff", b"\x00", b"\r\n", b"..", b"../../jobs.sqlite", b"%2e%2e", b"'--"),
    *("\u2028".encode(), b"\xed\xa0\x80", b"null", b"[]", b"file-" + b"0" * 24, b"batch_" + b"0" * 24, b"x" * 10_000),
)
GOOD = {"endpoint": "/v1/completions", "completion_window": "24h"}
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 10**400, "", "x", "\ud800", "\x00", "x" * 100_000, [], {}, [[]], {"": ""}),
    *({"\ud800": "x"}, {"x": "\ud800"}, {"a": 1}, {"priority": "\ud800"}),
    {"anchor": "created_at", "seconds": 10**400},
)
FIELDS = (
    "input_file_id",
    "endpoint",
    "completion_window",
    "metadata",
    "output_expires_after",
    "continue_from",
    "\ud800",
)
HEADERS: tuple[dict[str, str], ...] = (
    *({"Content-Type": value} for value in ("", "text/plain", "multipart/form-data", "multipart/form-data; boundary=")),
    *({"Content-Type": "multipart/form-data; boundary=" + value} for value in ("x", "x" * 5000, "\xff", '"')),
    *({"Idempotency-Key": value} for value in ("", "x" * 256, "x" * 5000, "\xff", "'--")),
    *({"Authorization": value} for value in ("", "Bearer", "Bearer \xff", "Basic eA==")),
    *(
        {"Host": "["},
        {"Host": ""},
    ),
    *({"Range": "bytes=9-1"}, {"Accept": "x/y"}, {"Accept-Encoding": "gzip"}, {"Expect": "x"}, {"Origin": "http://["}),
)
BODIES = (
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff",
    b"[" * 100_000,
    b'{"a": NaN}',
    b"--x",
    b"--x\r\n\r\n",
    b"--x--",
    b"\x00" * 99,
)


def requests_of(
    method: str, path: str, operation: dict[str, Any], file_id: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield requests to one operation, each with one hostile value in it."""
    parameters = [one for one in operation.get("parameters", []) if one["in"] in ("path", "query")]
    if not any(one["in"] == "path" for one in parameters):
        yield path, {}
    for parameter in parameters:
        for value in HOSTILE:
            text = quote_from_bytes(value, safe="")
            name = parameter["name"]
            yield path.replace(f"{{{name}}}", text) if parameter["in"] == "path" else f"{path}?{name}={text}", {}
    concrete = path.replace("{file_id}", file_id).replace("{batch_id}", "batch_" + "0" * 24)
    yield from ((concrete, {"headers": headers}) for headers in HEADERS)
    if method != "get":
        multipart = {"Content-Type": "multipart/form-data; boundary=x"}
        yield from ((concrete, {"headers": headers, "data": b"{}"}) for headers in HEADERS)
        yield from ((concrete, {"headers": multipart, "data": body}) for body in BODIES)


def bodies_of_jobs(file_id: str) -> Iterator[bytes]:
    good = {**GOOD, "input_file_id": file_id}
    for field in FIELDS:
        yield from (json.dumps({**good, field: value}).encode() for value in VALUES)
    yield from (json.dumps({"continue_from": value}).encode() for value in VALUES)


class Checked:
    """Sends requests, and checks each answer against the document."""

    def __init__(self, session: aiohttp.ClientSession, url: str, paths: dict[str, Any]) -> None:
        self._session, self._url, self._paths = session, url, paths
        self.num_asked = 0

    async def ask(self, method: str, template: str, path: str, **given: Any) -> None:
        self.num_asked += 1
        async with self._session.request(method, URL(self._url + path, encoded=True), **given) as answer:
            data, status = await answer.read(), answer.status
        exchange = (method, path[:100], str(given)[:300], status, data[:300])
        listed = self._paths[template][method]["responses"]
        # An empty or a longer path is another operation's, or none.
        assert str(status) in listed or (path.split("?")[0] != template and status in (404, 405)), exchange
        assert status < 500 or template == "/health", exchange
        if status >= 400 and template != "/health":
            error = json.loads(data.decode())
            assert set(error) == {"error"}, exchange
            assert set(error["error"]) == {"message", "type", "param", "code"}, exchange
            assert error["error"]["message"], exchange
        elif str(status) in listed:
            assert answer.content_type in listed[str(status)]["content"], exchange


def test_every_operation_takes_hostile_values_of_everything(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        _, found = await client.ask("GET", "/openapi.json")
        file = await client.upload()
        checked = Checked(client._session, client.url, found["paths"])
        for path, operations in found["paths"].items():
            for method, operation in operations.items():
                for one, given in requests_of(method, path, operation, file["id"]):
                    await checked.ask(method, path, one, **given)
        file = await client.upload()
        for body in bodies_of_jobs(file["id"]):
            await checked.ask("post", "/v1/batches", "/v1/batches", data=body)
        assert checked.num_asked > 700
        for path in ("/v1/batches?limit=100", "/v1/files", "/v1/sgl_batch/progress"):
            assert (await client.ask("GET", path))[0] == 200, "a created object can be retrieved"
        assert (await client.create(file["id"]))[0] == 200

    run(tmp_path, scenario)


@pytest.mark.parametrize("name", ["\ud800", "a\x00b", "../x", "x" * 5000, ""])
def test_a_files_name_may_be_anything(tmp_path: Path, name: str) -> None:
    async def scenario(client: Client) -> None:
        boundary, head = "edge", b'Content-Disposition: form-data; name="file"; filename="'
        body = b"--edge\r\n" + head + name.encode("utf-8", "surrogatepass") + b'"\r\n\r\nx\r\n'
        body += b'--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--edge--\r\n'
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        status, _ = await client.ask("POST", "/v1/files", data=body, headers=headers)
        assert status in (200, 400)
        assert (await client.ask("GET", "/v1/files"))[0] == 200

    run(tmp_path, scenario)


def test_each_of_our_operations_is_documented_with_its_answers(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        status, found = await client.ask("GET", "/openapi.json")
        assert status == 200
        assert {(method, path) for path, operations in found["paths"].items() for method in operations} == {
            *(("post", "/v1/files"), ("get", "/v1/files"), ("get", "/v1/files/{file_id}")),
            *(("delete", "/v1/files/{file_id}"), ("get", "/v1/files/{file_id}/content"), ("post", "/v1/batches")),
            *(("get", "/v1/batches"), ("get", "/v1/batches/{batch_id}"), ("post", "/v1/batches/{batch_id}/cancel")),
            *(("get", "/v1/sgl_batch/progress"), ("get", "/openapi.json"), ("get", "/health"), ("get", "/metrics")),
            *(("get", "/v1/sgl_batch/instances"), ("post", "/v1/sgl_batch/instances")),
            ("delete", "/v1/sgl_batch/instances/{name}"),
            ("post", "/v1/sgl_batch/instances/{name}/drain"),
            ("get", "/"),
        }
        assert "multipart/form-data" in found["paths"]["/v1/files"]["post"]["requestBody"]["content"]
        assert "422" not in json.dumps(found)
        assert LINE["url"] in json.dumps(found["paths"]["/v1/batches"]["post"])

    run(tmp_path, scenario)


def test_the_engines_operations_are_added_and_never_replace_ours() -> None:
    ours = {"paths": {"/health": {"get": "ours"}}, "components": {"schemas": {}}, "openapi": "3.1.0"}
    engines = {"paths": {"/health": {"get": "theirs"}, "/generate": {"post": {}}}, "components": {"schemas": {"A": {}}}}
    found = with_engine_operations(ours, json.dumps(engines).encode())
    assert found["paths"] == {"/health": {"get": "ours"}, "/generate": {"post": {}}}
    assert found["components"]["schemas"] == {"A": {}}
    assert with_engine_operations(ours, None)["paths"] == ours["paths"]


def test_an_operation_without_a_description_is_a_fault() -> None:
    app = FastAPI()
    app.add_api_route("/new", lambda: None)
    with pytest.raises(KeyError, match="/new"):
        document(app)
