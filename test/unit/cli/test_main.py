"""The command itself: subcommands, help, and that it answers at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sgl_batch.cli.main import main

HEAVY = ("torch", "sglang", "transformers", "numpy")


CHECK = ["check", "--model", str(Path(__file__).resolve().parents[2] / "models" / "tiny-qwen3-moe")]


def run_cli(*argv):
    return subprocess.run([sys.executable, "-m", "sgl_batch.cli", *argv], capture_output=True, text=True, timeout=60)


def test_no_command_is_bad_usage(capsys):
    assert main([]) == 1
    assert "no command given" in capsys.readouterr().err


def test_an_unknown_command_is_bad_usage_and_is_named(capsys):
    assert main(["rnu"]) == 1
    assert "'rnu'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-h", "--help", "help"])
def test_help_lists_the_commands(capsys, flag):
    assert main([flag]) == 0
    out = capsys.readouterr().out
    assert "run " in out
    assert "serve " in out


def test_help_of_run_states_exit_codes_and_an_example():
    done = run_cli("run", "--help")
    assert done.returncode == 0
    for part in ("exit codes:", "  2    finished; some lines failed", "  130  stopped by Ctrl-C", "example:"):
        assert part in done.stdout
    assert "--b-attn-decode" in done.stdout


@pytest.mark.parametrize(
    "argv", [["run", "--help"], ["run", "-i", "no.jsonl", "-o", "o.jsonl", "--model", "m"], [], ["models"], CHECK]
)
def test_help_and_mistakes_import_nothing_heavy(argv):
    program = (
        "import sys, contextlib\n"
        "from sgl_batch.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        f"print('loaded:', [name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_missing_flags_exit_with_1_and_name_the_flag():
    done = run_cli("run", "-i", "in.jsonl")
    assert done.returncode == 1
    assert "-o/--output" in done.stderr
    assert "Traceback" not in done.stderr
