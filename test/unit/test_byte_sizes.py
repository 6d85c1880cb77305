"""Sizes in bytes are read from text and formatted for people."""

from __future__ import annotations

import pytest

from sgl_batch.byte_sizes import format_bytes, parse_bytes
from sgl_batch.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        (" 42 ", 42),
        ("8K", 8 << 10),
        ("512M", 512 << 20),
        ("8G", 8 << 30),
        ("8g", 8 << 30),
        ("2T", 2 << 40),
        ("1.5GiB", 3 << 29),
        ("3 MiB", 3 << 20),
        ("0.3K", 307),
        ("-5", -5),
    ],
)
def test_letters_are_powers_of_1024(text, num_bytes):
    assert parse_bytes("kv_store_bytes", text) == num_bytes


@pytest.mark.parametrize("text", ["", "G", "8X", "8GB", "1.5", "1e9", "8G8", "-1G", "0x10", "eight", "8 G B", "٨G"])
def test_a_text_that_is_no_size_is_refused_with_the_option_and_what_it_takes(text):
    with pytest.raises(ConfigError, match=r"^kv_store_bytes is .*; it takes a number of bytes, or .* 512M, 8G, 1.5GiB"):
        parse_bytes("kv_store_bytes", text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.00 KiB"), (5 << 19, "2.50 MiB"), (3 << 40, "3.00 TiB")],
)
def test_sizes_are_formatted_with_three_digits_and_a_unit(num_bytes, text):
    assert format_bytes(num_bytes) == text
