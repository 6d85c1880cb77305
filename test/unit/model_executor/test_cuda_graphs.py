"""The order in which work is run and captured, on a stand-in for torch.cuda; graphs themselves need a GPU."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_batch.model_executor.cuda_graphs import CaptureError, CudaGraphs


class Device:
    """Notes what is asked of it; what runs while it captures has no effect until the graph is replayed."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.streams = ["computing"]
        self.free_bytes = 1000
        self.capturing: list[Any] | None = None
        self.is_spoilt = False

    def do(self, what: str) -> None:
        if self.capturing is None:
            self.notes.append(f"{what} on {self.streams[-1]}")
        else:
            self.capturing.append(what)

    @contextmanager
    def stream(self, stream: Any):
        self.streams.append(stream.name)
        try:
            yield
        finally:
            self.streams.pop()

    def current_stream(self) -> Any:
        return SimpleNamespace(name=self.streams[-1])

    def new_stream(self) -> Any:
        return SimpleNamespace(
            name="side",
            wait_stream=lambda other: self.notes.append(f"side waits for {other.name}"),
            synchronize=lambda: self.notes.append("host waits for side"),
        )

    def new_graph(self) -> Any:
        work: list[str] = []

        def begin(pool: str, capture_error_mode: str) -> None:
            self.notes.append(f"capture into {pool}, {capture_error_mode}")
            self.capturing = work

        def end() -> None:
            self.notes.append("capture ends")
            self.capturing = None
            if self.is_spoilt:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.free_bytes -= 30

        return SimpleNamespace(capture_begin=begin, capture_end=end, replay=lambda: [self.do(what) for what in work])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device, pools = Device(), count(1)
    for name, stand_in in {
        "Stream": device.new_stream,
        "stream": device.stream,
        "current_stream": device.current_stream,
        "CUDAGraph": device.new_graph,
        "graph_pool_handle": lambda: f"pool {next(pools)}",
        "mem_get_info": lambda: (device.free_bytes, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return device


def test_work_runs_once_then_is_captured_and_replays_on_the_callers_stream(device: Device) -> None:
    def work() -> None:
        device.do("work")
        device.free_bytes -= 5

    captured = CudaGraphs().capture(work)
    assert device.notes == [
        "side waits for computing",
        "work on side",
        "host waits for side",
        "capture into pool 1, thread_local",
        "capture ends",
    ]
    captured.replay()
    captured.replay()
    assert device.notes[5:] == ["work on computing"] * 2
    assert captured.num_bytes == 5 + 5 + 30, "of the run for its effect, and of the capture"


def test_captures_share_a_pool_until_it_is_released(device: Device) -> None:
    graphs = CudaGraphs()
    for _ in range(2):
        graphs.capture(lambda: device.do("work"))
    graphs.release()
    graphs.capture(lambda: device.do("work"))
    assert [note.split()[3] for note in device.notes if note.startswith("capture into")] == ["1,", "1,", "2,"]


def test_work_that_cannot_be_captured_has_run_once_and_leaves_no_open_capture(device: Device) -> None:
    def waits_for_the_device() -> None:
        if device.capturing is not None:
            device.is_spoilt = True
            raise RuntimeError("operation not permitted when stream is capturing")
        device.do("work")

    with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        CudaGraphs().capture(waits_for_the_device)
    assert "work on side" in device.notes
    assert device.capturing is None
    assert device.streams == ["computing"]


def test_an_error_of_the_work_itself_is_no_capture_error(device: Device) -> None:
    def fails() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        CudaGraphs().capture(fails)
    assert "capture ends" not in device.notes
