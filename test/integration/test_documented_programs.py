"""The Python programs of README and the documentation run as they stand, and leave nothing on the terminal behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = ("README.md", "docs/batches.md")
_PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.engine
@pytest.mark.parametrize("page", PAGES)
def test_the_program_with_an_engine_answers_and_ends_quietly(page: str, repo_root: Path, tmp_path: Path) -> None:
    (code,) = _PROGRAM.findall((repo_root / page).read_text(encoding="utf-8"))
    program = tmp_path / "program.py"
    program.write_text(code, encoding="utf-8")
    ran = subprocess.run([sys.executable, program], cwd=repo_root, capture_output=True, text=True, check=True)
    answer, _, _ = ran.stdout.partition("{")
    assert len(answer.split()) >= 8, "it shows some words of the model, and not the end of an answer at once"
    # What SGLang's loader and the engine say at the start. Nothing comes behind it when the interpreter ends.
    last = ran.stderr.splitlines()[-1]
    assert "plan: " in last
