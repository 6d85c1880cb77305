#!/usr/bin/env python
"""Measures what feeding instances costs the front: the pool of lines over Ray, with engines that answer at once.

The lines go through the real pool, the real actors with their spools, and an engine process that computes nothing. For
each round the processor time of this process (all threads, also those of Ray) is divided by the lines. The same lines
to an engine in this process, which answers every 0.1 s, give the cost of a caller: a task for each line, and its
answer. The difference is the cost of feeding. Beside it stands what actors and engines use, on their nodes.

Cases alternate; medians count. Needs no model.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop
from comparison.figures import spread
from comparison.report import table
from comparison.terminal import exit_code, say
from runners.instant_engine import ANSWER

from sgl_batch.control_plane.instances.cluster import connect
from sgl_batch.control_plane.instances.messages import encode
from sgl_batch.control_plane.instances.pool import InstancePool
from sgl_batch.control_plane.instances.ray_actor import MAX_CONCURRENCY, InstanceActor, InstanceSettings
from sgl_batch.core.answers import LineResponse
from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.jobs.line_engine import LineEngine

URL = "/v1/chat/completions"
_TICK_S = 0.1
_PROGRAM = (sys.executable, str(Path(__file__).with_name("runners") / "instant_engine.py"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of all lines. Processor seconds: `front_s` of this process, `actors_s` and `engines_s` of instances."""

    wall_s: float
    front_s: float
    actors_s: float = 0.0
    engines_s: float = 0.0


class CallerOnly:
    """A LineEngine in this process: it answers all lines at once every 0.1 s."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[LineResponse]] = []
        self._tick = asyncio.ensure_future(self._answer())

    async def respond(self, url: str, body: Mapping[str, object], partial_output: PartialOutput) -> LineResponse:
        """Return `ANSWER`."""
        future: asyncio.Future[LineResponse] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return await future

    def acknowledge(self, request_ids: list[str]) -> None:
        """It keeps no answers."""

    async def _answer(self) -> None:
        response = LineResponse(status_code=200, request_id="req", body=ANSWER)
        while True:
            await asyncio.sleep(_TICK_S)
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                future.set_result(response)

    def close(self) -> None:
        """Answer no more."""
        self._tick.cancel()


def bodies(count: int, chars: int) -> Iterator[dict[str, Any]]:
    """Yield chat requests with prompts of so many characters, each with a seed of its own."""
    words = "How many clips did she sell altogether in April and May? "
    prompt = (words * (chars // len(words) + 1))[:chars]
    for seed in range(count):
        messages = [{"role": "user", "content": prompt}]
        yield {"model": "instant", "messages": messages, "max_tokens": 64, "temperature": 0.7, "seed": seed}


async def feed(engine: LineEngine | CallerOnly, lines: Iterator[dict[str, Any]], in_flight: int) -> None:
    """Give all lines to an engine as jobs do: each as a task, so many in flight; each answer is acknowledged."""
    tasks: set[asyncio.Task[LineResponse]] = set()
    wake = asyncio.Event()

    def ended(task: asyncio.Task[LineResponse]) -> None:
        tasks.discard(task)
        engine.acknowledge([task.result().request_id])
        wake.set()

    for body in lines:
        while len(tasks) >= in_flight:
            wake.clear()
            await wake.wait()
        task = asyncio.ensure_future(engine.respond(URL, body, PartialOutput()))
        tasks.add(task)
        task.add_done_callback(ended)
    while tasks:
        wake.clear()
        await wake.wait()


async def measured(args: argparse.Namespace, engine: LineEngine | CallerOnly, actors: list[psutil.Process]) -> Round:
    """Feed all lines once."""
    engines = [engine for one in actors for engine in one.children(recursive=True)]
    before = _processor_s(actors), _processor_s(engines)
    wall, front = time.perf_counter(), time.process_time()
    await feed(engine, bodies(args.lines, args.chars), args.in_flight)
    wall, front = time.perf_counter() - wall, time.process_time() - front
    after = _processor_s(actors), _processor_s(engines)
    return Round(wall_s=wall, front_s=front, actors_s=after[0] - before[0], engines_s=after[1] - before[1])


def _processor_s(processes: list[psutil.Process]) -> float:
    return sum(one.cpu_times().user + one.cpu_times().system for one in processes)


async def run(args: argparse.Namespace, place: Path) -> list[tuple[Round, Round]]:
    """Start the instances, and return the rounds: of the pool, and of the caller alone."""
    import ray

    from sgl_batch.control_plane.instances.ray_member import RayMember

    pool = InstancePool(depth=args.in_flight // args.instances)
    actors = []
    node_id = ray.get_runtime_context().get_node_id()
    remote = ray.remote(InstanceActor).options(num_cpus=0, max_concurrency=MAX_CONCURRENCY)
    for number in range(args.instances):
        settings = InstanceSettings(
            engine_argv=(), directory=str(place / f"i{number}"), incarnation=1, program=_PROGRAM
        )
        member = RayMember(f"i{number}", 1, "here", node_id, remote.remote(encode(settings)))
        actors.append(psutil.Process((await member.ping()).pid))
        pool.join(member)
    while len(pool.loads()) < args.instances:
        await asyncio.sleep(_TICK_S)
    caller = CallerOnly()
    gc.freeze()  # as fronts do
    await measured(args, pool, actors)  # imports, and caches of Ray
    rounds = []
    profile = cProfile.Profile() if args.profile else None
    for number in range(args.rounds):
        if profile is not None:
            profile.enable()
        fed = await measured(args, pool, actors)
        if profile is not None:
            profile.disable()
        rounds.append((fed, await measured(args, caller, [])))
        say(f"round {number + 1}: {_us(fed.front_s, args):.1f} us of the front a line, {fed.wall_s:.1f} s")
    if profile is not None:
        profile.dump_stats(args.profile)
    caller.close()
    members = pool.all_members()
    await pool.close()
    await asyncio.gather(*(one.stop() for one in members))
    return rounds


def _us(seconds: float, args: argparse.Namespace) -> float:
    return seconds / args.lines * 1e6


def report(args: argparse.Namespace, rounds: list[tuple[Round, Round]]) -> str:
    """Return the table of microseconds a line."""
    found = {
        "front, in all": [_us(fed.front_s, args) for fed, _ in rounds],
        "the caller alone": [_us(alone.front_s, args) for _, alone in rounds],
        "feeding": [_us(fed.front_s - alone.front_s, args) for fed, alone in rounds],
        "actors": [_us(fed.actors_s, args) for fed, _ in rounds],
        "engines": [_us(fed.engines_s, args) for fed, _ in rounds],
    }
    rows = []
    for name, values in found.items():
        of = spread(values)
        assert of is not None, "there is a round"
        rows.append([name, f"{of.median:.1f}", f"{of.low:.1f}-{of.high:.1f}"])
    rate = args.lines / statistics.median(fed.wall_s for fed, _ in rounds)
    return f"{table(['processor time', 'us a line', 'spread'], rows)}\n\n{rate:,.0f} lines/s"


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--lines", type=int, default=20000, help="of each round")
    parser.add_argument("--chars", type=int, default=300, help="of each prompt")
    parser.add_argument("--in-flight", type=int, default=4096, help="lines in flight, of all instances")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", metavar="FILE", help="write a profile of the front's rounds; it makes them slower")
    args = parser.parse_args()

    def work() -> int:
        with tempfile.TemporaryDirectory(prefix="rd", dir="/tmp") as directory:
            cluster = connect(None, Path(directory), "feeding")
            try:
                rounds = uvloop.run(run(args, Path(directory)))
            finally:
                cluster.close()
        print(report(args, rounds))
        return 0

    return exit_code("instance_feeding.py", work)


if __name__ == "__main__":
    sys.exit(main())
