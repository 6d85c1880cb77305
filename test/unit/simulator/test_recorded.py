"""A recorded run is simulated again: the same sequences, plan, memory and decisions."""

from __future__ import annotations

from collections import defaultdict

import made_runs as made
import pytest

from sgl_batch.core.admission_policy import RESERVE
from sgl_batch.errors import ConfigError
from sgl_batch.planner.pass_cost import PassTime
from sgl_batch.simulator.kv_forms import RankPages
from sgl_batch.simulator.recorded import read_run, running_over_time, simulated


class WithMemory(made.LineCosts):
    """Costs of a machine whose kernel takes time to provide memory."""

    def of_first_use(self, tokens: float) -> PassTime:
        parts = defaultdict(float, {"new memory": tokens * 1e-9})
        return PassTime(parts=parts, bounds=parts.copy(), bottleneck="new memory")


def recorded(form: str, lengths: list[tuple[int, int]]):
    asked, scheduler = made.requests(lengths), made.Recorded(form)
    run = made.instance(asked, made.plan(), form=form, scheduler=scheduler)
    return run.run(), scheduler.events, asked


@pytest.mark.parametrize("form", ["device", "inclusive", "exclusive", "streamed"])
def test_a_recorded_run_takes_the_same_time_again(form):
    account, events, asked = recorded(form, made.some_lengths(50, seed=3))
    run = read_run(events)
    assert run.form == form
    assert run.memory.device == 60
    assert form == "device" or run.memory.store == 200
    assert list(run.requests.outputs) == list(asked.outputs)
    again = simulated(run, WithMemory(), {0: RESERVE}).run()
    assert again.steps == account.steps
    assert again.seconds - again.parts["new memory"] == pytest.approx(account.seconds)
    assert again.parts["new memory"] > 0


def test_lengths_that_came_out_replace_those_that_were_allowed():
    _, events, asked = recorded("device", [(16, 40), (16, 40)])
    run = read_run(events, outputs={"0": 7})
    assert list(run.requests.outputs) == [7, 40]
    assert list(run.requests.most) == list(asked.most)


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([], "no decision about queued"),
        ([{"t": 1.0, "sequence": "a", "from": "QUEUED", "to": "READY"}], "--trace-file"),
    ],
)
def test_a_trace_without_decisions_is_refused(events, says):
    with pytest.raises(ConfigError, match=says):
        read_run(events)


def test_running_sequences_over_time_are_those_that_the_trace_says():
    def change(at: float, name: str, before: str, after: str):
        return {"t": at, "sequence": name, "from": before, "to": after}

    times, counts = running_over_time(
        [
            change(10.0, "a", "QUEUED", "PREFILLING"),
            change(11.0, "a", "READY", "RUNNING"),
            change(12.0, "b", "READY", "RUNNING"),
            change(13.0, "a", "RUNNING", "FINISHED"),
            change(13.5, "c", "RUNNING", "FINISHED"),  # it ran before the trace began
        ]
    )
    assert times == [0.0, 0.0, 1.0, 2.0, 3.0, 3.5]
    assert counts == [0, 0, 1, 2, 1, 1]
    with pytest.raises(ConfigError, match="no changes of state"):
        running_over_time([])


def test_memory_is_what_the_records_say():
    _, events, _ = recorded("device", [(16, 40)])
    assert read_run(events).memory == RankPages(device=60, store=1 << 40)
