"""The command `ranks.py long-tail`: bad arguments end it with one line, before anything is started."""

from __future__ import annotations

import pytest
from long_tail.command import parse, sizes_of
from ranks import main

from sgl_batch.errors import ConfigError


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "nowhere"], "--model nowhere is not a checkpoint directory"),
        (["--model", "MODEL", "--ranks", "1"], "--ranks is 1"),
        (["--model", "MODEL", "--rounds", "-1"], "--rounds is -1"),
        (["--model", "MODEL", "--only", "a,e"], "--only has 'e'"),
        (["--model", "MODEL", "--many", "20"], "--many is 20; it must be at least 100"),
        (["--model", "MODEL", "--trace", "nowhere.csv"], "--trace nowhere.csv is not a file"),
        (["--model", "MODEL", "--prompt-option", "fast"], "--prompt-option is 'fast'; it takes NAME=VALUE"),
    ],
)
def test_a_bad_argument_ends_the_command_with_one_line(argv, message, repo_root, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(repo_root / "test" / "models" / "tiny-qwen3-moe")
    assert main(["long-tail", *(model if word == "MODEL" else word for word in argv)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_options_of_the_long_prompt_keep_their_type():
    argv = ["--model", "m", "--prompt-option", "partition-below=3", "--prompt-option", "migration=never"]
    sizes = sizes_of(parse([*argv, "--few", "111"]))
    assert sizes.prompt_options == {"partition_below": 3, "migration": "never"}
    assert sizes.few == 111


def test_an_option_without_a_value_is_refused():
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        sizes_of(parse(["--model", "m", "--prompt-option", "x"]))


def test_without_rounds_the_command_reports_what_the_record_has(repo_root, capsys, tmp_path):
    model = str(repo_root / "test" / "models" / "tiny-qwen3-moe")
    assert main(["long-tail", "--model", model, "--rounds", "0", "--out", str(tmp_path / "none")]) == 0
    assert "| b: all, over separate or longest" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
