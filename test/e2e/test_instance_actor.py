"""Instances on a Ray cluster: a run on two nodes; answers outlive a process; nothing outlives its node."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from sgl_batch.control_plane.instances.messages import EngineDeath, Line, Lot, Poll, Report, encode, key_of
from sgl_batch.control_plane.instances.ray_actor import MAX_CONCURRENCY, InstanceActor, InstanceSettings

from .conftest import RunFiles, chat_line

pytestmark = pytest.mark.engine

WITHIN_S = 100
_MIB = 1 << 20


@dataclass
class Cluster:
    """A node without cores for this process, and two of one core; the test may kill the first of these."""

    address: str
    node_id: str
    raylet: psutil.Process


@pytest.fixture(scope="module")
def cluster(ray_environment: dict[str, str]) -> Iterator[Cluster]:
    """Start a cluster of three nodes."""
    import ray
    from ray.cluster_utils import Cluster as Nodes

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 * _MIB}
    nodes = Nodes(initialize_head=True, head_node_args=head)
    node, _ = (nodes.add_node(num_cpus=1, object_store_memory=80 * _MIB) for _ in range(2))
    ray.init(address=nodes.address, log_to_driver=False)
    yield Cluster(nodes.address, node.node_id, psutil.Process(node.all_processes["raylet"][0].process.pid))
    ray.shutdown()
    nodes.shutdown()


def test_a_run_is_answered_by_instances_on_two_nodes_and_leaves_nothing_there(
    cluster: Cluster, run_command: Callable[..., RunFiles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    lines = [chat_line(f"line {n}", f"Say {n}.", max_tokens=n + 1, ignore_eos=True, temperature=0) for n in range(24)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run_command(source, tmp_path / "out.jsonl", "--instances", "2", "--ray-address", cluster.address)
    assert done.exit_code == 0, done.stderr
    assert [one["custom_id"] for one in done.output] == [line["custom_id"] for line in lines]
    tokens = [one["response"]["body"]["usage"]["completion_tokens"] for one in done.output]
    assert tokens == [line["body"]["max_tokens"] for line in lines]
    counters = done.manifest["engine"]["counters"]
    assert (counters["sequences_finished"], counters["generated_tokens"]) == (len(lines), sum(tokens))
    assert [(one["name"], one["cores"]) for one in done.manifest["plan"]["instances"]] == [("i1", 1), ("i2", 1)]
    assert not ray.util.list_named_actors(all_namespaces=True)
    assert not list((tmp_path / "tmp").iterdir())


def start_instance(cluster: Cluster, directory: Path, model: Path, incarnation: int) -> Any:
    """Return a RayMember of a new actor with an engine of the tiny Qwen3-MoE model."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from sgl_batch.control_plane.instances.ray_member import RayMember

    settings = InstanceSettings(
        engine_argv=("--model-path", str(model), "--served-model-name", "tiny", "--dtype", "float32"),
        directory=str(directory),
        incarnation=incarnation,
        cores=(min(os.sched_getaffinity(0)),),
        environment={"OMP_NUM_THREADS": "1"},
    )
    actor = ray.remote(InstanceActor).options(
        num_cpus=1,
        max_concurrency=MAX_CONCURRENCY,
        scheduling_strategy=NodeAffinitySchedulingStrategy(cluster.node_id, soft=False),
    )
    handle = actor.remote(encode(settings))
    return RayMember("i0", incarnation, "here", cluster.node_id, handle)


def line(number: int, max_tokens: int = 4) -> Line:
    body = {"model": "tiny", "prompt": f"Say {number}.", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body).encode()
    return Line(key_of("/v1/completions", data, 0), "/v1/completions", data)


async def until(member: Any, is_reached: Callable[[Report], bool], **fields: Any) -> Report:
    """Poll until a report says what is waited for."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        report: Report = await member.poll(Poll(wait_s=1.0, **fields))
        if is_reached(report):
            return report
        assert time.monotonic() < deadline, report
        await asyncio.sleep(0.05)


async def answers_to(member: Any, lines: list[Line], after: int = 0) -> list[Any]:
    assert await member.submit(Lot(tuple(lines)))
    report = await until(member, lambda report: len(report.answers) == len(lines), after_answer=after)
    assert {one.key for one in report.answers} == {one.key for one in lines}
    return list(report.answers)


def runs(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie has ended: what has to reap it is no process of ours."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def left_of(tree: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Return the processes that still run after so many seconds."""
    deadline = time.monotonic() + within_s
    while (left := [one for one in tree if runs(one)]) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return left


def tree_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


async def scheduler_in(pid: int) -> psutil.Process:
    """Return the scheduler below a process. It has its title some time after it began."""
    for _ in range(10 * int(WITHIN_S)):
        found = [one for one in tree_of(pid) if "scheduler" in " ".join(one.cmdline())]
        if found:
            return found[0]
        await asyncio.sleep(0.1)
    known = [(one.name(), one.cmdline()[:3], next(iter(one.environ()), "")) for one in tree_of(pid)]
    raise AssertionError(f"no scheduler among {known}")


def run(scenario: Awaitable[None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario, 2 * WITHIN_S)

    asyncio.run(bounded())


def test_an_instance_goes_on_after_its_engine_and_the_next_one_after_its_process(
    cluster: Cluster, tmp_path: Path, repo_root: Path
) -> None:
    model = repo_root / "test" / "models" / "tiny-qwen3-moe"
    run(_lives(cluster, tmp_path, model))


async def _lives(cluster: Cluster, directory: Path, model: Path) -> None:
    from sgl_batch.control_plane.instances.member import MemberLostError

    member = start_instance(cluster, directory, model, 1)
    presence = await member.ping()
    report = await until(member, lambda report: report.phase == "ready")
    assert report.facts is not None
    assert report.facts.served_model_names == ("tiny",)
    first = await answers_to(member, [line(0), line(1)])
    assert [one.status_code for one in first] == [200, 200]

    # The engine's scheduler is killed under a long line.
    long = line(9, max_tokens=3000)
    assert await member.submit(Lot((long,)))
    assert await member.known() == (long.key,)
    tree = tree_of(presence.pid)
    assert {tuple(process.cpu_affinity()) for process in tree} == {(min(os.sched_getaffinity(0)),)}
    (await scheduler_in(presence.pid)).send_signal(signal.SIGKILL)
    report = await until(member, lambda report: bool(report.deaths), after_answer=2)
    (death,) = report.deaths
    assert death == EngineDeath(1, death.message, None, (long.key,))
    assert presence.log in death.message
    await until(member, lambda report: report.phase == "ready", after_answer=2, after_death=1)
    (second,) = await answers_to(member, [line(2)], after=2)

    # The actor is killed after the first two answers were acknowledged.
    await member.poll(Poll(after_answer=3, after_death=1, acknowledged=tuple(one.key for one in first)))
    tree = tree_of(presence.pid)
    os.kill(presence.pid, signal.SIGKILL)
    assert not await left_of(tree, 10.0), "the engine ends with its actor"
    with pytest.raises(MemberLostError, match="its process on here is gone"):
        await member.poll(Poll(wait_s=1.0))

    following = start_instance(cluster, directory, model, 2)
    report = await until(following, lambda report: bool(report.answers))
    assert [(one.number, one.key, one.body) for one in report.answers] == [(1, second.key, second.body)]

    # The node dies.
    tree = [psutil.Process((await following.ping()).pid)]
    while len(tree) < 2:
        tree = [tree[0], *tree[0].children(recursive=True)]
    cluster.raylet.kill()
    assert not await left_of(tree, 2.0), "actor and engine end with their node"
    with pytest.raises(MemberLostError):
        await following.poll(Poll(wait_s=1.0))
