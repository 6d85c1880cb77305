"""Files of the user's cache: one for each key, and always whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_batch.user_cache import cache_directory, hashed_name, write_json


def test_the_cache_is_the_user_s_own() -> None:
    assert cache_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/sgl_batch")
    assert cache_directory({}).parts[-2:] == (".cache", "sgl_batch")


def test_equal_keys_have_one_name_and_others_have_others() -> None:
    assert hashed_name({"a": 1, "b": 2}) == hashed_name({"b": 2, "a": 1})
    assert len({hashed_name(key) for key in ({"a": 1}, {"a": 2}, ["a", 1])}) == 3


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "one.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": [2, object()]})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]
    write_json(path, {"a": 3})
    assert json.loads(path.read_text()) == {"a": 3}
