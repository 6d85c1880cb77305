"""/v1/files and /v1/batches over a real service and a real socket, without an engine: shapes, limits, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from files_client import MAX_FILE_BYTES, Client, form, run

KEY = "users"


def test_a_file_comes_back_byte_by_byte_and_can_be_deleted(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        content = bytes(range(256)) * 300
        file = await client.upload(content, expires_after__anchor="created_at", expires_after__seconds="3600")
        assert (file["object"], file["bytes"], file["purpose"]) == ("file", len(content), "batch")
        assert file["expires_at"] == file["created_at"] + 3600
        assert await client.ask("GET", f"/v1/files/{file['id']}") == (200, file)
        async with client._session.get(f"{client.url}/v1/files/{file['id']}/content") as answer:
            assert await answer.read() == content
            assert answer.headers["Content-Length"] == str(len(content))
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        deleted = {"id": file["id"], "object": "file", "deleted": True}
        assert await client.ask("DELETE", f"/v1/files/{file['id']}") == (200, deleted)
        await client.refusal("GET", f"/v1/files/{file['id']}", 404)
        await client.refusal("GET", f"/v1/files/{file['id']}/content", 404)

    run(tmp_path, scenario)


def test_a_users_filename_names_nothing_on_the_disk_and_in_no_header(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        name = '../../etc/x"\r\nX-Evil: 1'
        boundary, quoted = "edge", name.replace('"', "%22").replace("\r\n", "%0D%0A")
        body = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{quoted}"\r\n\r\nx\r\n'
            f"--{boundary}--\r\n"
        )
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        _, file = await client.ask("POST", "/v1/files", data=body.encode(), headers=headers)
        assert "etc" in file["filename"]
        async with client._session.get(f"{client.url}/v1/files/{file['id']}/content") as answer:
            assert answer.headers["Content-Disposition"] == f'attachment; filename="{file["id"]}.jsonl"'
        assert [path.name for path in (client.directory / "files").iterdir()] == [file["id"]]

    run(tmp_path, scenario)


def test_a_file_beyond_the_limit_is_refused_whatever_its_declared_length(tmp_path: Path) -> None:
    async def without_length() -> AsyncIterator[bytes]:
        yield b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(40):
            yield b"x" * 100_000

    async def scenario(client: Client) -> None:
        error = await client.refusal("POST", "/v1/files", 413, data=form(b"x" * (MAX_FILE_BYTES + 1)))
        assert error["code"] == "file_too_large"
        headers = {"Content-Type": "multipart/form-data; boundary=edge"}
        error = await client.refusal("POST", "/v1/files", 413, data=without_length(), headers=headers)
        assert error["code"] == "file_too_large"
        assert list((client.directory / "partial").iterdir()) == []
        assert (await client.ask("GET", "/v1/files"))[1]["data"] == []
        assert (await client.upload(b"x" * MAX_FILE_BYTES))["bytes"] == MAX_FILE_BYTES

    run(tmp_path, scenario)


def test_an_upload_that_is_cut_off_leaves_nothing(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        host, port = client.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = b"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3000000\r\n"
        head += b"Content-Type: multipart/form-data; boundary=edge\r\n\r\n"
        part = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 2_000_000
        writer.write(head + part)
        await writer.drain()
        while not list((client.directory / "partial").iterdir()):
            await asyncio.sleep(0.01)
        writer.close()
        while list((client.directory / "partial").iterdir()):
            await asyncio.sleep(0.01)
        assert (await client.ask("GET", "/v1/files"))[1]["data"] == []

    run(tmp_path, scenario)


def test_files_are_listed_page_by_page(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        ids = [(await client.upload())["id"] for _ in range(5)]
        found: list[str] = []
        after = ""
        while True:
            _, page = await client.ask("GET", f"/v1/files?limit=2&order=asc{after}")
            assert page["object"] == "list"
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            found += [file["id"] for file in page["data"]]
            after = f"&after={page['last_id']}"
            if not page["has_more"]:
                break
        assert sorted(found) == sorted(ids)
        assert len(found) == 5
        assert (await client.ask("GET", "/v1/files?purpose=batch_output"))[1]["data"] == []

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"purpose": "fine-tune"}, "purpose"), ({"purpose": ""}, "purpose"), ({"expires_after__seconds": "5"}, None)],
)
def test_bad_fields_of_an_upload_are_refused(tmp_path: Path, fields: dict[str, str], param: str | None) -> None:
    async def scenario(client: Client) -> None:
        error = await client.refusal("POST", "/v1/files", 400, data=form(b"x", **fields))
        assert param is None or error["param"] == param
        assert (await client.ask("GET", "/v1/files"))[1]["data"] == []

    run(tmp_path, scenario)


def test_jobs_are_created_once_for_each_idempotency_key_listed_and_cancelled(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        file = await client.upload()
        status, job = await client.create(file["id"], key="k", metadata={"a": "b"})
        assert (status, job["object"], job["metadata"]) == (200, "batch", {"a": "b"})
        assert (await client.create(file["id"], key="k", metadata={"a": "b"}))[1]["id"] == job["id"]
        status, other = await client.create(file["id"], key="k", metadata={"a": "c"})
        assert (status, other["error"]["code"]) == (409, "idempotency_key_reused")
        ids = {job["id"], *[(await client.create(file["id"]))[1]["id"] for _ in range(2)]}
        _, page = await client.ask("GET", "/v1/batches?limit=2")
        assert page["has_more"]
        _, rest = await client.ask("GET", f"/v1/batches?limit=2&after={page['last_id']}")
        assert not rest["has_more"]
        assert {one["id"] for one in page["data"] + rest["data"]} == ids
        assert (await client.ask("GET", f"/v1/batches/{job['id']}"))[1]["id"] == job["id"]
        status, cancelled = await client.ask("POST", f"/v1/batches/{job['id']}/cancel")
        assert (status, cancelled["status"]) == (200, "cancelling")

    run(tmp_path, scenario)


REFUSED = [
    ("GET", "/v1/files/file-000000000000000000000000", 404),
    ("GET", "/v1/files/jobs.sqlite/content", 404),
    ("GET", "/v1/batches/batch_x/output", 404),
    ("DELETE", "/v1/files/x", 404),
    ("GET", "/v1/batches/batch_000000000000000000000000", 404),
    ("POST", "/v1/batches/batch_x/cancel", 404),
    ("PUT", "/v1/files", 405),
    ("DELETE", "/v1/batches", 405),
    ("POST", "/health", 405),
    ("GET", "/v1/batches?limit=0", 400),
    ("GET", "/v1/batches?limit=101", 400),
    ("GET", "/v1/batches?limit=x", 400),
    ("GET", "/v1/batches?after=batch_x", 404),
    ("GET", "/v1/files?limit=10001", 400),
    ("GET", "/v1/files?order=up", 400),
    ("POST", "/v1/files", 400),
    ("POST", "/v1/batches", 400),
    ("POST", "/v1/completions", 503),
    ("GET", "/v1/anything", 503),
]
BAD_BODIES = [
    (b"{", 400),
    (b"[]", 400),
    (b"\xff", 400),
    (b"[" * 100_000, 400),
    (b'{"x": "' + b"y" * (1 << 20) + b'"}', 413),
    (b'{"input_file_id": "file-x"}', 400),
    (b'{"input_file_id": 5, "endpoint": "/v1/completions", "completion_window": "24h"}', 400),
]


def test_every_refusal_has_the_one_shape(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        for method, path, status in REFUSED:
            error = await client.refusal(method, path, status)
            assert error["message"], path
            assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error"), path
        error = await client.refusal("GET", "/v1/files/..%2F..%2Fjobs.sqlite/content", 404)
        assert error["code"] == "not_found", "a path with dots is the admin's alone"

    run(tmp_path, scenario)


def test_a_method_that_a_path_has_not_is_refused_with_those_it_has(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        for path, allowed in (("files", "GET, POST"), ("files/x", "DELETE, GET"), ("batches/x/cancel", "POST")):
            async with client._session.request("PUT", f"{client.url}/v1/{path}") as answer:
                assert (answer.status, answer.headers["Allow"]) == (405, allowed)

    run(tmp_path, scenario)


def test_bad_bodies_of_jobs_are_refused(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        for body, status in BAD_BODIES:
            await client.refusal("POST", "/v1/batches", status, data=body)

    run(tmp_path, scenario)


def test_a_key_is_needed_for_files_and_jobs_but_not_by_probes(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        error = await client.refusal("GET", "/v1/files", 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        await client.refusal("GET", "/v1/sgl_batch/progress", 401)
        error = await client.refusal("POST", "/flush_cache", 403, headers={"Authorization": f"Bearer {KEY}"})
        assert (error["type"], error["code"]) == ("permission_error", "control_disabled")
        assert (await client.ask("GET", "/v1/files", headers={"Authorization": f"Bearer {KEY}"}))[0] == 200
        assert (await client.ask("GET", "/health"))[0] == 503, "there is no engine"
        async with client._session.get(f"{client.url}/") as answer:
            assert answer.status == 200
            assert "script-src 'unsafe-inline'" in answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]

    run(tmp_path, scenario, api_key=KEY)


def test_metrics_count_jobs_by_status_and_name_none(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        file = await client.upload()
        _, job = await client.create(file["id"])
        async with client._session.get(f"{client.url}/metrics") as answer:
            text = await answer.text()
        assert "sgl_batch:jobs_created_total 1.0" in text
        assert "sgl_batch:engine_ready 0.0" in text
        assert 'sgl_batch:num_jobs{status="' in text
        assert job["id"] not in text

    run(tmp_path, scenario)


def test_the_page_gets_jobs_and_the_state_of_the_engine(tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        file = await client.upload()
        _, job = await client.create(file["id"])
        status, found = await client.ask("GET", "/v1/sgl_batch/progress")
        assert status == 200
        assert [one["id"] for one in found["jobs"]] == [job["id"]]
        assert found["health"]["engine"]["state"] == "starting"
        assert found["engine"]["samples"] == []

    run(tmp_path, scenario)
