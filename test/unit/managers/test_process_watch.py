"""The first process that fails or dies is reported at once by its name and signal; normal ends are not reported."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from sgl_batch.managers.process_watch import ProcessEndedError, ProcessWatch, end_of

FORK = multiprocessing.get_context("fork")
Start = Callable[[Callable[[Connection], object]], tuple[BaseProcess, Connection]]


def is_ready(pipe: Connection) -> None:
    """Send the info, and live on."""
    pipe.send({"status": "ready"})
    signal.pause()


def lives(pipe: Connection) -> None:
    signal.pause()


def dies(pipe: Connection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def closes(pipe: Connection) -> None:
    os._exit(1)


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a process with one end of a pipe, and returns the process and the other end."""
    started: list[BaseProcess] = []

    def begin(body: Callable[[Connection], object]) -> tuple[BaseProcess, Connection]:
        reader, writer = FORK.Pipe(duplex=False)
        process = FORK.Process(target=body, args=(writer,))
        process.start()
        writer.close()
        started.append(process)
        return process, reader

    yield begin
    for process in started:
        process.kill()
        process.join()


def test_after_their_end_no_descriptor_of_the_processes_is_left_open() -> None:
    before, watch = os.listdir("/proc/self/fd"), ProcessWatch()
    reader, writer = FORK.Pipe(duplex=False)
    process = FORK.Process(target=is_ready, args=(writer,))
    process.start()
    writer.close()
    watch.add("the process", [process])
    watch.await_ready([reader], [process])
    watch.watch(lambda _: None)
    watch.stop()
    process.kill()
    watch.close()
    assert os.listdir("/proc/self/fd") == before


def test_await_ready_returns_the_info_of_each_process(start: Start) -> None:
    watch, (first, second) = ProcessWatch(), (start(is_ready), start(is_ready))
    watch.add("the scheduler", [first[0], second[0]])
    watch.add("the detokenizer", [start(lives)[0]])
    assert watch.await_ready([first[1], second[1]], [first[0], second[0]]) == [{"status": "ready"}] * 2


@pytest.mark.parametrize(
    ("scheduler", "detokenizer", "message"),
    [
        (lives, dies, r"^the detokenizer died: SIGKILL \(its process was killed\), .* the machine has .*GiB: lower"),
        (dies, lives, r"^the scheduler died: SIGKILL"),
        (
            closes,
            lives,
            r"^the scheduler failed \(exit code 1\); its own message .* below `if __name__ == ",
        ),
    ],
)
def test_await_ready_raises_when_any_process_ends(
    scheduler: Callable[[Connection], object], detokenizer: Callable[[Connection], object], message: str, start: Start
) -> None:
    watch, (process, reader) = ProcessWatch(), start(scheduler)
    watch.add("the scheduler", [process])
    watch.add("the detokenizer", [start(detokenizer)[0]])
    with pytest.raises(ProcessEndedError, match=message):
        watch.await_ready([reader], [process])


def test_a_process_that_dies_is_reported_until_the_watch_is_stopped(start: Start) -> None:
    watch, ends = ProcessWatch(), queue.Queue[str]()
    (ends_in_order, _), (killed, _), (other, _) = start(lambda _: os._exit(0)), start(lives), start(lives)
    watch.add("the router", [ends_in_order])
    watch.add("the scheduler", [killed, other])
    watch.watch(ends.put)
    ends_in_order.join()
    killed.kill()
    assert ends.get(timeout=60).startswith("the scheduler died: SIGKILL (its process was killed)")
    watch.stop()
    other.kill()
    other.join()
    watch.stop()
    assert ends.empty()


def test_a_stopped_watch_reports_nothing_and_a_pickled_one_is_empty(start: Start) -> None:
    watch, ends = ProcessWatch(), queue.Queue[str]()
    process, reader = start(lives)
    watch.add("the scheduler", [process])
    sent = pickle.loads(pickle.dumps(watch))  # noqa: S301
    watch.watch(ends.put)
    watch.stop()
    process.kill()
    process.join()
    assert ends.empty()
    sent.watch(ends.put)
    sent.stop()
    assert ends.empty()
    reader.close()


def test_an_end_is_named_by_its_signal() -> None:
    assert end_of(-signal.SIGSEGV) == "died: SIGSEGV (a fault in native code); its stack stands above"
    assert end_of(-signal.SIGTERM) == "died: SIGTERM (its process was killed)"
    assert end_of(-200) == "died: signal 200 (its process was killed)"
    assert "; it had taken 1.50 GiB of memory, and" in end_of(-signal.SIGKILL, 3 << 29)
