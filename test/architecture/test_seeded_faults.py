"""Owns the rule that each fault that can be seeded is one of a line in the source, and of tests that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from long.seeded_faults import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_the_source_has_the_line_and_the_tests_are_there(fault: Fault, repo_root: Path) -> None:
    assert fault.old in fault.source(repo_root / "python" / "sgl_batch").read_text()
    assert all(file.is_file() for file in fault.test_files())
