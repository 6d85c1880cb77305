"""The benchmark of instances runs the cases that are named, and refuses other names."""

from __future__ import annotations

import pytest
from instances import cases, named

from sgl_batch.errors import ConfigError


def test_cases_run_in_their_own_order_and_all_without_names():
    assert [one.name for one in named(cases(8), "killed, not ahead")] == ["not ahead", "killed"]
    assert named(cases(8), "") == cases(8)


def test_a_name_that_is_no_case_is_refused():
    with pytest.raises(ConfigError, match="--only has 'twice'; the cases are lone, one, separate, two, not ahead"):
        named(cases(8), "two,twice")
