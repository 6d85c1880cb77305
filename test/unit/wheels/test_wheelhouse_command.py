"""Tests of the command's arguments, and of the instructions that it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from wheels.command import main
from wheels.instructions import write_instructions, write_versions
from wheels.target import Target
from wheels.trimming import Trim

TARGET = Target(python="3.12", glibc=(2, 39))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cuda", "--without", "flash_ops"], "--without needs --compute-capability"),
        (["--cpu", "--compute-capability", "9.0"], "goes with --cuda"),
        (["--cuda", "--compute-capability", "hopper"], "is 'hopper'; give two numbers"),
        (["--cuda", "--glibc", "2.31"], "need glibc 2.34 or newer"),
        (["--cuda", "--have", "none.txt"], "none.txt cannot be read"),
        (["--cuda", "--parts", "38M"], "--parts with --cuda needs --have"),
        (["--cpu", "--parts", "small"], "--parts is 'small'; give a number with K, M or G"),
    ],
)
def test_options_that_cannot_be_met_are_refused_before_anything_is_written(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "house"), *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "house").exists()


def test_the_command_starts_and_its_help_has_examples(repo_root: Path) -> None:
    command = [sys.executable, str(repo_root / "scripts" / "wheelhouse"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "scripts/wheelhouse wheels --cuda --python 3.12 --have have.txt" in done.stdout


def test_a_target_takes_wheels_up_to_its_glibc() -> None:
    platforms = TARGET.platforms()
    assert platforms[0] == "manylinux_2_39_x86_64"
    assert {"manylinux_2_5_x86_64", "manylinux1_x86_64", "manylinux2014_x86_64"} < set(platforms)
    assert "manylinux_2_40_x86_64" not in platforms


def test_versions_name_each_wheel_exactly(tmp_path: Path) -> None:
    names = ["sglang_kernel-0.4.5+sm90-cp310-abi3-manylinux2014_x86_64.whl", "Some.Name-1.0-1-py3-none-any.whl"]
    assert write_versions(tmp_path, names).read_text() == "sglang-kernel==0.4.5+sm90\nsome-name==1.0\n"


def test_instructions_name_what_the_target_needs_and_what_was_trimmed(tmp_path: Path) -> None:
    trim = Trim(capability=(9, 0), without=("flash_ops",))
    path = write_instructions(tmp_path, target=TARGET, cuda=True, present=True, source="kernels.tar.gz", trim=trim)
    text = path.read_text()
    assert "python3.12 -m venv --system-site-packages env" in text
    assert "pip install --no-index --find-links . --no-deps -r requirements.txt" in text
    assert "--no-build-isolation ./kernels.tar.gz" in text
    assert "compute capability 9.0 (folder sm90)" in text
    assert "--attention-backend triton" in text


def test_instructions_ask_for_nothing_that_is_not_needed(tmp_path: Path) -> None:
    path = write_instructions(tmp_path, target=TARGET, cuda=False, present=False, source=None, trim=None)
    text = path.read_text()
    assert not any(word in text for word in ("system-site-packages", "g++", "sglang-kernel", "pip check"))
