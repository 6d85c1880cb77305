"""`sgl-batch run` on two ranks reports each rank's work, names a rank that dies or hangs, and keeps finished lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from .conftest import RunFiles, chat_line, read_lines, run_argv
from .reachable import exposed_to_others
from .test_run_command import wait_for_output

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RANKS = ("--tp", "2", "--dp", "2", "--ep", "2", "--enable-dp-attention", "--rank-timeout-s", "8")


@pytest.fixture
def two_ranks(repo_root: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run on two ranks that takes minutes unless a test stops it; short lines finish early.

    The ranks share a host KV store, in a file, for the KV that their small devices cannot hold.
    """
    source, output, store = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "store"
    store.mkdir()
    sizes = ("--b-moe-decode", "16", "--page-size", "8", "--max-total-tokens", "800")
    stores = ("--kv-store-bytes", str(1 << 28), "--kv-store-dir", str(store))
    lines = [chat_line(f"line-{i}", "Return the", max_tokens=4 + 400 * (i > 40), ignore_eos=True) for i in range(600)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    process = subprocess.Popen(
        run_argv(repo_root, source, output, "--progress", "plain", *sizes, *stores, *RANKS),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process, output
    for child in psutil.Process(process.pid).children(recursive=True) if psutil.pid_exists(process.pid) else ():
        child.send_signal(signal.SIGCONT)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the scheduler processes, by rank."""
    children = psutil.Process(process.pid).children(recursive=True)
    found = [child for child in children if "scheduler" in " ".join(child.cmdline())]
    assert len(found) == 2, [child.cmdline() for child in children]
    return sorted(found, key=lambda child: " ".join(child.cmdline()))


@pytest.mark.parametrize(
    ("sent", "message"),
    [(signal.SIGKILL, "rank 1 of the engine died"), (signal.SIGSTOP, "rank 1 of the engine hangs")],
    ids=["killed", "stopped"],
)
def test_a_rank_that_dies_or_hangs_is_named_and_finished_lines_are_kept(
    two_ranks: tuple[subprocess.Popen[str], Path], sent: signal.Signals, message: str
) -> None:
    process, output = two_ranks
    wait_for_output(process, output)
    assert exposed_to_others(process.pid) == []
    ranks = ranks_of(process)
    ranks[1].send_signal(sent)
    begun = time.monotonic()
    _, stderr = process.communicate(timeout=120)
    assert time.monotonic() - begun < 60
    assert process.returncode == 3, stderr
    assert message in stderr
    assert len(read_lines(output)) >= 20
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    assert not list((output.parent / "store").iterdir())


def test_the_summary_reports_the_work_of_each_rank(run_command: Callable[..., RunFiles], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [chat_line(f"line-{i}", "Return the", max_tokens=12, ignore_eos=True) for i in range(9)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = run_command(source, tmp_path / "out.jsonl", *RANKS)
    assert run.exit_code == 0, run.stderr
    report = run.stderr.splitlines()
    start = next(number for number, line in enumerate(report) if "By rank" in line)
    rows = [[int(cell.replace(",", "")) for cell in line.split()[2:-1]] for line in report[start + 2 : start + 4]]
    finished, tokens, arrived, departed, routed = (sum(column) for column in zip(*rows, strict=True))
    assert finished == len(lines)
    assert tokens == 12 * len(lines)
    assert arrived == departed
    prompt_tokens = sum(line["response"]["body"]["usage"]["prompt_tokens"] for line in run.output)
    layers, top_k = 4, 4
    rows = layers * (prompt_tokens + tokens - len(lines))  # the last token of each is only sampled
    unread = prompt_tokens - len(lines)  # the last layer's experts compute the last token of a prompt alone
    assert routed == top_k * (rows - unread)
    assert all(line.rstrip().endswith("%") for line in report[start + 2 : start + 4])
