"""Keys come from a flag, a file or the environment; invalid ones are refused, and no key is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_batch.api.front_options import parse_front_options
from sgl_batch.errors import ConfigError

KINDS = [
    ("--api-key", "api_key", "SGL_BATCH_API_KEY"),
    ("--admin-api-key", "admin_api_key", "SGL_BATCH_ADMIN_API_KEY"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("from-the-file\n")
    return path


@pytest.mark.parametrize(("flag", "name", "variable"), KINDS)
def test_the_flag_comes_first_then_the_file_then_the_environment(
    flag: str, name: str, variable: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(parse_front_options([]), name) is None
    monkeypatch.setenv(variable, "from-the-environment")
    assert getattr(parse_front_options([]), name) == "from-the-environment"
    options = parse_front_options([f"{flag}-file", str(file)])
    assert getattr(options, name) == "from-the-file"
    assert options.engine_argv == (), "the engine sees neither"
    assert getattr(parse_front_options([flag, "from-the-flag"]), name) == "from-the-flag"
    with pytest.raises(ConfigError, match="both give the key"):
        parse_front_options([flag, "a", f"{flag}-file", str(file)])


def test_a_key_of_the_environment_opens_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_BATCH_API_KEY", "k")
    assert parse_front_options(["--host", "0.0.0.0"]).api_key == "k"


def test_a_config_file_may_name_the_file(tmp_path: Path, file: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"admin-api-key-file: {file}\n")
    assert parse_front_options(["--config", str(config)]).admin_api_key == "from-the-file"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"secret-1\nsecret-2\n", "more than one line"),
        (b"s" * 5000, "more than one line"),
        (b"secret \xff", "cannot be read"),
        ("sécret".encode(), "a header cannot carry"),
        (b"secret\x00", "a header cannot carry"),
    ],
)
def test_a_file_without_one_key_is_refused_and_not_shown(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refused:
        parse_front_options(["--api-key-file", str(path)])
    assert "secret" not in str(refused.value)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("key", ["", " ", "k ", "é"])
def test_a_key_that_no_header_can_carry_is_refused_from_every_source(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--api-key "):
        parse_front_options(["--api-key", key])
    monkeypatch.setenv("SGL_BATCH_API_KEY", key)
    with pytest.raises(ConfigError, match="SGL_BATCH_API_KEY "):
        parse_front_options([])


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--api-key-file .*absent cannot be read"):
        parse_front_options(["--api-key-file", str(tmp_path / "absent")])
