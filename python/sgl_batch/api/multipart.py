"""Reads a multipart/form-data body as it arrives: small fields into memory, the one file in pieces to a callback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from sgl_batch.errors import RequestError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MAX_FIELD_BYTES = 4096
_MAX_PARTS = 32


@dataclass(slots=True, kw_only=True)
class Form:
    """The fields of a form. `filename` is None until a file comes."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


def _bad(message: str, param: str | None = None) -> RequestError:
    return RequestError(code="invalid_multipart", message=message, param=param)


class _Reader:
    """The parser's callbacks. They collect the pieces of the body, and write nothing themselves."""

    def __init__(self, file_field: str) -> None:
        self.form = Form()
        self.pieces: list[bytes] = []
        self.is_complete = False
        self._file_field = file_field
        self._num_parts = 0
        self._headers: dict[bytes, bytes] = {}
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._name = ""
        self._value: bytearray | None = None

    def callbacks(self) -> MultipartCallbacks:
        """Return the functions that the parser calls."""
        return {
            "on_part_begin": self.on_part_begin,
            "on_header_field": self.on_header_field,
            "on_header_value": self.on_header_value,
            "on_header_end": self.on_header_end,
            "on_headers_finished": self.on_headers_finished,
            "on_part_data": self.on_part_data,
            "on_part_end": self.on_part_end,
            "on_end": self.on_end,
        }

    def on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise _bad(f"the form has more than {_MAX_PARTS} parts")
        self._headers = {}

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def on_header_end(self) -> None:
        self._headers[bytes(self._header[0]).lower()] = bytes(self._header[1])
        self._header = (bytearray(), bytearray())

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name != self._file_field:
            self._value = bytearray()
            return
        if self.form.filename is not None:
            raise _bad("the form has more than one file", self._file_field)
        self._value = None
        self.form.filename = options.get(b"filename", b"").decode("utf-8", "replace") or "upload.jsonl"

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._value is None:
            self.pieces.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise _bad(f"the field {self._name!r} has more than {_MAX_FIELD_BYTES} bytes", self._name)

    def on_part_end(self) -> None:
        if self._value is not None:
            self.form.fields[self._name] = bytes(self._value).decode("utf-8", "replace")

    def on_end(self) -> None:
        self.is_complete = True


async def read_form(
    content_type: str,
    chunks: AsyncIterator[bytes],
    write: Callable[[bytes], Awaitable[None]],
    *,
    file_field: str,
) -> Form:
    """Read a form to its end, and pass each piece of its file to `write`. Raises RequestError for a bad form."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise _bad(f"the content type is {content_type!r}; send the file as multipart/form-data with a boundary")
    reader = _Reader(file_field)
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        async for chunk in chunks:
            parser.write(chunk)
            for piece in reader.pieces:
                await write(piece)
            reader.pieces.clear()
    except FormParserError as error:
        raise _bad(f"the form cannot be read: {error}") from error
    if not reader.is_complete:
        raise _bad("the form ends before its last boundary: the upload was cut off")
    if reader.form.filename is None:
        raise _bad(f"the form has no field {file_field!r} with the file", file_field)
    return reader.form
