"""The server's short help: two pages, shown at once, of flags that exist."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sgl_batch.api.front_options import parse_front_options
from sgl_batch.api.server_help import SGLANG_FLAGS

TWO_PAGES = 120
NO_ENGINE = "assert not {'torch', 'sglang', 'uvicorn'} & set(sys.modules)"


@pytest.mark.parametrize("program", ["sgl_batch.cli.main:serve", "sgl_batch.launch_server:"])
def test_help_is_two_pages_without_the_engines_libraries(program: str) -> None:
    module, _, command = program.partition(":")
    argv = [*([command] if command else []), "--help"]
    code = f"import sys; from {module} import main; assert main({argv}) == 0; {NO_ENGINE}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "120"}
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) <= TWO_PAGES
    named = ("sgl-batch serve" if command else "python -m sgl_batch.launch_server") + " --model-path"
    assert done.stdout.startswith(f"usage: {named}")
    for flag in ("--jobs-dir", "--device-memory", "--b-moe-decode", "--tp", "--help-all", "--api-key-file"):
        assert f"  {flag}" in done.stdout
    assert "examples:" in done.stdout


def test_sglangs_flags_are_passed_on_but_for_those_that_the_server_reads() -> None:
    taken = {"--host": "127.0.0.1", "--port": "1"}
    argv = [part for flag, metavar, _ in SGLANG_FLAGS for part in ([flag, taken.get(flag, "x")] if metavar else [flag])]
    options = parse_front_options(argv)
    assert options.port == 1
    given = {flag for flag, _, _ in SGLANG_FLAGS}
    assert {one for one in options.engine_argv if one.startswith("--")} == given - set(taken)
