"""A bring-up runs each stage in its own process, ends it whole, keeps what it found, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bringup.runner import Bringup, Wanted
from bringup.stages import Runs, Stage, result_of
from bringup.state import FAILED, NOT_RUN, OK

PYTHON = (sys.executable, "-I", "-S", "-c")
EVERYWHERE = frozenset(Runs)
# Writes its child's number; neither ends by itself, nor when it is asked to.
HANGING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    with open(sys.argv[1] + ".partial", "w") as file:
        file.write(str(child))
    os.rename(sys.argv[1] + ".partial", sys.argv[1])
else:
    os.setsid()
time.sleep(60)
"""


def stage(name: str, code: str, *arguments: str, **more) -> Stage:
    given = {"what": name, "runs": Runs.EITHER, "argv": (*PYTHON, code, *arguments)}
    return Stage(name=name, **{**given, **more})


@pytest.fixture
def call(tmp_path: Path) -> Callable[..., Bringup]:
    """One call of the command over the same folder."""

    def made(*stages: Stage, here: frozenset[Runs] = EVERYWHERE, say=lambda _: None, **wanted) -> Bringup:
        asked = Wanted(here=here, lacking="needs a GPU", **wanted)
        return Bringup(stages, tmp_path, asked, environment=dict(os.environ), say=say, grace_s=0.1)

    return made


def states(bringup: Bringup) -> dict[str, str]:
    return {name: outcome.state for name, outcome in bringup.state.outcomes.items()}


def has_ended(number: int) -> bool:
    return not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE


def test_a_failed_stage_reports_its_error_and_stages_that_need_it_are_not_run(call, tmp_path: Path) -> None:
    result = json.dumps({"tokens": "9 of 9", "remark": "quick"})
    good = f"open({str(result_of(tmp_path, 'good'))!r}, 'w').write({result!r})"
    bad = "print('before'); raise ValueError('no such kernel')"
    stages = (stage("good", good), stage("bad", bad), stage("after", "", needs=("bad",)), stage("last", ""))
    first = call(*stages)
    assert not first.run()
    assert states(first) == {"good": OK, "bad": FAILED, "after": NOT_RUN, "last": OK}
    assert first.state.get("bad").remark == "ValueError: no such kernel"
    assert first.state.get("after").remark == "needs bad, which is failed"
    assert (first.state.get("good").tokens, first.state.get("good").remark) == ("9 of 9", "quick")
    assert "before" in (tmp_path / "bad.log").read_text()
    table = (tmp_path / "table.txt").read_text()
    assert table == first.table() + "\n"
    assert table.splitlines()[-1] == "2 ok, 1 failed, 1 not run"


def test_a_second_call_goes_on_and_runs_failed_stages_only_when_asked(call, tmp_path: Path) -> None:
    ran, mended = tmp_path / "ran", tmp_path / "mended"
    noting = f"open({str(ran)!r}, 'a').write(sys.argv[1])"
    stages = (
        stage("one", f"import sys; {noting}", "1"),
        stage("two", f"import os, sys; {noting}; os.stat({str(mended)!r})", "2"),
        stage("three", f"import sys; {noting}", "3", needs=("two",)),
    )

    def again(**wanted) -> str:
        ran.write_text("")
        call(*stages, **wanted).run()
        return ran.read_text()

    assert again() == "12"
    assert again() == ""
    assert again(again=True) == "2"
    mended.touch()
    assert again(only=("three",)) == "23", "with what it needs and has not"
    assert again(only=("one",)) == "1"
    assert again(again=True) == ""
    assert call(*stages).run()


def test_a_stage_that_hangs_dies_with_its_children_and_the_next_one_is_run(call, tmp_path: Path) -> None:
    child = tmp_path / "child"
    hanging = stage("hanging", HANGING, str(child), limit_s=0.5)
    done = call(hanging, stage("next", ""))
    assert not done.run()
    assert states(done) == {"hanging": FAILED, "next": OK}
    assert done.state.get("hanging").remark == "killed after 0.5 s; see hanging.log"
    assert has_ended(int(child.read_text()))


def test_what_a_stage_leaves_behind_ends_with_it(call, tmp_path: Path) -> None:
    child = tmp_path / "child"
    leaving = f"""
import os, time
child = os.fork()
if child:
    open({str(child)!r}, "w").write(str(child))
else:
    time.sleep(60)
"""
    done = call(stage("leaving", leaving))
    assert done.run()
    assert has_ended(int(child.read_text()))


def test_stages_that_do_not_fit_the_time_or_the_machine_are_not_run_and_are_later(call) -> None:
    stages = (
        stage("short", "", expected_s=0.1),
        stage("long", "", expected_s=100.0),
        stage("cut", "import time; time.sleep(60)", expected_s=0.1),
        stage("gpu", "", runs=Runs.GPU),
    )
    first = call(*stages, here=frozenset({Runs.EITHER}), seconds=0.5)
    assert first.run(), "none has failed"
    assert states(first) == {"short": OK, "long": NOT_RUN, "cut": NOT_RUN, "gpu": NOT_RUN}
    assert first.state.get("long").remark.startswith("no time: ")
    assert first.state.get("cut").remark.endswith("the end of --minutes")
    assert first.state.get("gpu").remark == "needs a GPU"
    second = call(*stages[:2], stages[3])
    assert second.run()
    assert {name: states(second)[name] for name in ("short", "long", "gpu")} == dict.fromkeys(
        ("short", "long", "gpu"), OK
    )


def test_a_stage_under_way_when_the_bring_up_is_killed_is_run_again(call) -> None:
    stages = (stage("one", ""), stage("two", "", expected_s=0.0))

    class Killed(BaseException):
        pass

    def killed(line: str) -> None:
        if line.startswith("    ok"):
            raise Killed

    with pytest.raises(Killed):
        call(*stages, say=killed).run()
    second = call(*stages)
    assert second.state.get("one").state == OK
    assert second.run()
    assert states(second) == {"one": OK, "two": OK}
