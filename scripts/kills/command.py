"""The long form of the server's crash test: kills its processes while jobs run, and looks at every line after.

A real server with a tiny model, and a client that keeps jobs of some hundred lines running through the `openai`
package: plain ones, and ones that it cancels, continues and deletes. Meanwhile the front, the engine's host, its
scheduler or its detokenizer is killed (SIGKILL) at random moments, and the front at each failpoint of the jobs.

With `--instances` it is a server with several engines on a Ray cluster of the harness: actors, nodes (with and without
their disk), the processes of engines and the server are killed, some while the last kill is not yet over.

Every job must end with one line for each
custom_id, with the status and the body of an undisturbed run (up to ids and times). Exit code 1 where one does not, or
where a process outlives what it belongs to. A line that was alone in the engine at two kills counts as its killer, and
may have the error `engine_crashed`; these are counted apart. `test/e2e/test_server_deaths.py` is the short form.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kills.client import Client, Load
from kills.instances import ADMIN_KEY, Instances
from kills.lines import Findings, essence, request_lines
from kills.one_engine import OneEngine
from kills.server_process import ServerProcess
from sgl_batch.control_plane.ray_environment import prepare

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run it once; prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="at random moments (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0, help="no kill after so long (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=300, help="of each job (default: %(default)s)")
    parser.add_argument("--pause-s", type=float, default=4.0, help="most time before a kill (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="of the moments; printed where not given")
    parser.add_argument("--no-failpoints", action="store_true", help="random moments alone")
    parser.add_argument("--instances", type=int, help="of a server on Ray; they have no failpoints")
    parser.add_argument("--nodes", type=int, default=3, help="of its Ray cluster, a core each (default: %(default)s)")
    parser.add_argument(
        "--overlap",
        type=float,
        default=0.25,
        help="so many kills come before all instances are ready after the last one (default: %(default)s)",
    )
    parser.add_argument("--model", type=Path, default=ROOT / "test" / "models" / "tiny-qwen3-moe")
    args = parser.parse_args()
    args.seed = random.randrange(1 << 32) if args.seed is None else args.seed
    place = Path(tempfile.mkdtemp(prefix="kill-harness-"))
    print(f"seed {args.seed}, {args.lines} lines a job, server's log and jobs in {place}", flush=True)
    findings, begun = Findings(), time.monotonic()
    is_good = (run_one if args.instances is None else run_instances)(args, place, findings)
    findings.report(time.monotonic() - begun)
    return 1 if findings.faults or not is_good else 0


def run_one(args: argparse.Namespace, place: Path, findings: Findings) -> bool:
    """Kill the processes of a server with one engine."""
    dice = random.Random(args.seed)
    server = ServerProcess(args.model, place)
    engine = OneEngine(server, dice, args.pause_s)
    server.start()
    try:
        server.until_ready()
        under_load(
            server.url,
            request_lines(args.lines, dice),
            findings,
            lambda: engine.kill_all(
                args.kills, time.monotonic() + 60 * args.minutes, failpoints=not args.no_failpoints
            ),
        )
    finally:
        server.stop()
    engine.report()
    return True


def run_instances(args: argparse.Namespace, place: Path, findings: Findings) -> bool:
    """Kill what belongs to a server with several instances. Return whether no process outlived its own."""
    directory = Path(tempfile.mkdtemp(prefix="rk", dir="/tmp"))  # Ray's sockets have names of at most 107 characters
    prepare(directory)
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # of a busy machine
    from kills.nodes import Nodes

    dice, nodes = random.Random(args.seed), Nodes(args.nodes)
    flags = ["--instances", str(args.instances), "--ray-address", nodes.address, "--admin-api-key", ADMIN_KEY]
    server = ServerProcess(args.model, place, flags)
    instances = Instances(server, nodes, place / "jobs", args.instances, dice, args.pause_s, args.overlap, findings)
    server.start()
    try:
        if instances.until_all_ready():
            end_s = time.monotonic() + 60 * args.minutes
            under_load(
                server.url,
                request_lines(args.lines, dice),
                findings,
                lambda: instances.kill_all(args.kills, end_s),
            )
    finally:
        server.stop()
        nodes.close()
        instances.check_end()
        shutil.rmtree(directory, ignore_errors=True)
    instances.report()
    return not instances.orphans


def under_load(url: str, lines: list[dict[str, Any]], findings: Findings, kill: Callable[[], None]) -> None:
    """Run the lines undisturbed, then kill while jobs of them run."""
    begun = time.monotonic()
    _, records = Client(url, threading.Event()).run(lines, "plain", "undisturbed")
    wanted = {record["custom_id"]: essence(record) for record in records}
    assert len(wanted) == len(records) == len(lines), "the undisturbed run lacks lines"
    print(f"undisturbed run: {len(records)} lines, {time.monotonic() - begun:.0f} s", flush=True)
    load = Load(url, lines, wanted, findings)
    load.start()
    try:
        kill()
    finally:
        load.wait()
