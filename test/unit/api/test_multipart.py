"""A form's file goes to the callback in pieces, however the body is cut; a bad form is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.api.multipart import Form, read_form
from sgl_batch.errors import RequestError

TYPE = "multipart/form-data; boundary=edge"


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    tail = f'; filename="{filename}"' if filename is not None else ""
    return f'--edge\r\nContent-Disposition: form-data; name="{name}"{tail}\r\n\r\n'.encode() + value + b"\r\n"


END = b"--edge--\r\n"


def read(data: bytes, cuts: tuple[int, ...] = (), content_type: str = TYPE) -> tuple[Form, bytes]:
    """Read `data`, cut at `cuts`. Return the form, and the bytes of its file."""
    written = bytearray()

    async def chunks() -> AsyncIterator[bytes]:
        offsets = [0, *sorted(cuts), len(data)]
        for start, end in pairwise(offsets):
            yield data[start:end]

    async def write(piece: bytes) -> None:
        written.extend(piece)

    form = asyncio.run(read_form(content_type, chunks(), write, file_field="file"))
    return form, bytes(written)


def test_fields_and_the_file_come_in_any_order():
    whole = part("file", b'{"a": 1}\n', "in.jsonl"), part("purpose", b"batch"), part("expires_after[seconds]", b"3600")
    for parts in (whole, whole[::-1]):
        form, written = read(b"".join(parts) + END)
        assert written == b'{"a": 1}\n'
        assert form == Form(fields={"purpose": "batch", "expires_after[seconds]": "3600"}, filename="in.jsonl")


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=300), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_a_file_arrives_whole_however_it_is_cut(content, cuts):
    data = part("purpose", b"batch") + part("file", b"\r\n--edg" + content.replace(b"--edge", b""), "x") + END
    form, written = read(data, tuple(min(cut, len(data)) for cut in cuts))
    assert written == b"\r\n--edg" + content.replace(b"--edge", b"")
    assert form.fields == {"purpose": "batch"}


def test_a_filename_is_only_a_name():
    form, _ = read(part("file", b"x", "../../etc/passwd") + END)
    assert form.filename == "../../etc/passwd"


@pytest.mark.parametrize(
    ("data", "content_type", "words"),
    [
        (part("file", b"x", "a"), TYPE, "cut off"),
        (part("file", b"x", "a")[:-20], TYPE, "cut off"),
        (b"", TYPE, "cut off"),
        (part("purpose", b"batch") + END, TYPE, "no field 'file'"),
        (part("file", b"x", "a") + part("file", b"y", "b") + END, TYPE, "more than one file"),
        (part("purpose", b"b" * 5000) + END, TYPE, "more than 4096 bytes"),
        (b"".join(part(f"p{n}", b"x") for n in range(40)) + END, TYPE, "more than 32 parts"),
        (part("file", b"x", "a") + END, "application/json", "multipart/form-data"),
        (part("file", b"x", "a") + END, "multipart/form-data", "boundary"),
        (b"no boundary at all", TYPE, "cannot be read"),
    ],
)
def test_a_bad_form_is_refused_with_what_is_wrong(data, content_type, words):
    with pytest.raises(RequestError, match=words) as refusal:
        read(data, content_type=content_type)
    assert refusal.value.status_code == 400
    assert refusal.value.code == "invalid_multipart"
