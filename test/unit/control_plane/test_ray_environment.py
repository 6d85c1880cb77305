"""Ray's token is a private file of ours, and what the user has set for Ray stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sgl_batch.control_plane.ray_environment import LONGEST_DIRECTORY, prepare
from sgl_batch.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin without Ray's variables; all that it sets is undone."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name[:4] != "RAY_"})


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the name of a directory that is short enough for sockets."""
    monkeypatch.chdir(tmp_path)
    return Path(".")


def test_the_token_is_a_private_file_in_the_given_directory(short: Path) -> None:
    variables = prepare(short)
    token = Path(variables["RAY_AUTH_TOKEN_PATH"])
    assert token.parent == short
    assert token.stat().st_mode & 0o777 == 0o600
    assert len(token.read_text()) == 64
    assert variables["RAY_AUTH_MODE"] == os.environ["RAY_AUTH_MODE"] == "token"


def test_a_second_call_changes_nothing(short: Path) -> None:
    assert prepare(short) == prepare(short / "another")


@pytest.mark.parametrize(
    "name_and_value", [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "secret"), ("RAY_AUTH_TOKEN_PATH", "/etc/x")]
)
def test_what_the_user_has_set_stays(short: Path, name_and_value: tuple[str, str]) -> None:
    name, value = name_and_value
    os.environ[name] = value
    assert prepare(short)[name] == value
    assert not (short / "ray_token").exists()


def test_a_directory_with_a_name_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    long = tmp_path / ("x" * LONGEST_DIRECTORY)
    long.mkdir()
    with pytest.raises(ConfigError, match=f"at most {LONGEST_DIRECTORY}"):
        prepare(long)
