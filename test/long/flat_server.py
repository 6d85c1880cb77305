#!/usr/bin/env python
"""Owns the proof that a server's memory stays flat under 10,000 odd requests, with a real server.

It serves test/models/tiny-qwen3-moe and sends odd requests of many kinds (odd_requests.py), several at a time,
while it samples the memory of each of the server's processes. It fails (exit code 1) unless

- no request failed by a fault of the server, and the engine was never started again,
- no process's peak in the last quarter of the requests is above its peak in the second quarter by more than the bound,
- the server answers a good request afterwards, and ends with exit code 0 and no process left.

pytest does not collect this file: it takes some minutes on two cores. `--help` shows its flags.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import requests
from odd_requests import MODEL, is_allowed, one_request
from tree_memory import Memory, Samples, sample_tree

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
START_S, STOP_S = 300.0, 60.0
# The root of the tree is the server; the process below it without a title of SGLang's is the engine's.
NAMES = {"command": "server", "others": "engine"}


def say(text: str) -> None:
    """Write a line to standard output at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@contextmanager
def server(directory: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a server; yield its URL and its process, which is killed in the end if it still runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    model = str(ROOT / "test" / "models" / "tiny-qwen3-moe")
    argv = [sys.executable, "-m", "sgl_batch.launch_server", "--model-path", model, "--served-model-name", MODEL]
    argv += ["--port", str(port), "--jobs-dir", str(directory / "jobs"), "--log-level", "error"]
    argv += ["--max-total-tokens", str(1 << 18)]
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    with (directory / "log.txt").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        while health(url).get("status") != "ok":
            assert process.poll() is None, f"the server ended; see {directory / 'log.txt'}"
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.2)
        yield url, process
    finally:
        process.kill()
        process.wait()


def health(url: str) -> dict[str, object]:
    """Return the server's /health; {} while it does not answer."""
    try:
        found: dict[str, object] = requests.get(f"{url}/health", timeout=30).json()
    except requests.RequestException:
        return {}
    return found


def send_all(url: str, pid: int, args: argparse.Namespace) -> tuple[Counter[tuple[str, int]], list[Samples]]:
    """Send the requests; return the counts by kind and status, and the samples of each quarter of them."""
    answers: Counter[tuple[str, int]] = Counter()
    quarters = [Samples() for _ in range(4)]
    with ThreadPoolExecutor(args.at_once) as threads:
        for number, quarter in enumerate(quarters):
            begin = args.requests * number // 4
            waiting = [threads.submit(one_request, url, one) for one in range(begin, args.requests * (number + 1) // 4)]
            while not all(one.done() for one in waiting):
                quarter.taken.append(sample_tree(pid))
                time.sleep(args.sample_s)
            quarter.taken.append(sample_tree(pid))
            answers.update(one.result() for one in waiting)
            say(f"-- {begin + len(waiting):,} requests")
    return answers, quarters


def report(quarters: list[Samples], args: argparse.Namespace) -> bool:
    """Print the table of peaks; return whether every process stayed within the bound."""
    say(f"peak resident MiB by quarter; the bound on the last is the second's +{args.bound_mib:.0f} MiB")
    roles = dict.fromkeys(role for quarter in quarters for role in quarter.roles())
    flat = True
    for role in roles:
        peaks: list[Memory] = [quarter.peak(role) for quarter in quarters]
        grown = (peaks[3].rss_bytes - peaks[1].rss_bytes) / MIB
        flat = flat and grown <= args.bound_mib
        say(
            f"{NAMES.get(role, role):<12}"
            + "".join(f"{peak.rss_bytes / MIB:>10,.1f}" for peak in peaks)
            + f"{grown:>+10,.1f}"
        )
    return flat


def faults_of(url: str, process: subprocess.Popen[bytes], answers: Counter[tuple[str, int]]) -> list[str]:
    """Return the faults of the server, which is stopped for that."""
    found = [
        f"{number} times {kind} got {status}" for (kind, status), number in answers.items() if not is_allowed(status)
    ]
    engine = health(url).get("engine")
    if not isinstance(engine, dict) or engine["restarts"]:
        found.append(f"the engine was started again, or is gone: {engine}")
    body = {"model": MODEL, "prompt": "Say", "max_tokens": 2}
    if not requests.post(f"{url}/v1/completions", json=body, timeout=60).ok:
        found.append("a good request is not answered afterwards")
    tree = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    if process.wait(STOP_S) != 0:
        found.append(f"the server ended with exit code {process.returncode}")
    if left := [one.pid for one in tree if runs(one)]:
        found.append(f"processes {left} were left")
    return found


def runs(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie has ended; its parent is not one of the server's processes."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def main() -> int:
    """Send the requests; return 0 if all conditions hold, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, metavar="N", help="how many (%(default)s)")
    parser.add_argument("--at-once", type=int, default=8, metavar="N", help="of them at a time (%(default)s)")
    parser.add_argument("--bound-mib", type=float, default=64.0, help="MiB a peak may grow by (%(default)s)")
    parser.add_argument("--sample-s", type=float, default=0.5, help="seconds between samples (%(default)s)")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flat-server-") as directory, server(Path(directory)) as (url, process):
        answers, quarters = send_all(url, process.pid, args)
        say(f"{answers.total():,} requests in {time.monotonic() - began:.0f} s")
        for (kind, status), number in sorted(answers.items()):
            say(f"  {kind:<16}{status:>5}{number:>8,}")
        flat, faults = report(quarters, args), faults_of(url, process, answers)
    for fault in faults:
        say(f"FAULT: {fault}")
    is_good = flat and not faults
    say("PASSED" if is_good else "FAILED")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
