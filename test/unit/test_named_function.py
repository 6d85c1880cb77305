"""Functions that a user names are found, or what is wrong with the name is said."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.named_function import find_function


def test_a_function_is_found_by_the_name_of_its_module_and_its_own():
    assert find_function("on_refill", "math:sqrt", "a number") is math.sqrt


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:f", "the module no_such_module cannot be imported: No module named 'no_such_module'"),
        ("broken_module:f", "the module broken_module cannot be imported: .*invalid syntax"),
        ("math:no_such", "the module math has no such name: name a function of a number"),
        ("math:pi", "the module math has a value of type float there"),
    ],
)
def test_a_name_without_a_callable_is_refused_with_the_reason(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_module.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f"on_refill is '{name}', and {words}"):
        find_function("on_refill", name, "a number")
