"""Where a profile is kept, of what machine it is, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import made_profiles as made
import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.planner.samples import check_machine
from sgl_batch.startup.hardware import hardware
from sgl_batch.startup.kept_profile import keep_profile, profile_path, read_profile


def test_a_profile_reads_as_it_was_kept(tmp_path):
    path = tmp_path / "profiles" / "one.json"
    assert read_profile(path) is None
    keep_profile(path, made.profile())
    assert read_profile(path) == made.profile()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "sgl_batch.profile/1"}', '{"format": "other"}'])
def test_a_file_that_is_no_profile_is_refused_by_its_name(tmp_path, text):
    path = tmp_path / "one.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"one\.json .*make one with sgl-batch plan --profile"):
        read_profile(path)


@pytest.mark.parametrize(("name", "there"), [("processor", "another"), ("cores", 64), ("version_of_torch", "9")])
def test_a_profile_of_another_machine_or_version_is_refused_in_one_line(name, there):
    profile = replace(made.profile(), machine={**made.MACHINE, name: there})
    with pytest.raises(ConfigError, match=f"of another {name.replace('_', ' ')}") as refused:
        check_machine(profile, made.MACHINE)
    assert "\n" not in str(refused.value)
    check_machine(made.profile(), made.MACHINE)


def test_each_number_type_has_a_profile_of_its_own():
    paths = {
        profile_path(Path("a-model"), dtype=dtype, weight_dtype=weights)
        for dtype in ("bfloat16", "float32")
        for weights in ("auto", "int8")
    }
    assert len(paths) == 4


def test_the_machine_is_read_from_its_files(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("model name : A CPU\nflags : fpu avx2 avx512f\n")
    found = hardware(tmp_path)
    assert (found["processor"], found["instruction_set"], found["gpu"]) == ("A CPU", "avx512f", None)
    assert hardware(tmp_path / "nowhere")["processor"] == "unknown"
