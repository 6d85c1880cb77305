"""The loader overcomes short reads and file systems without direct reads, reports other errors, and closes cleanly."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sgl_batch_kernel.expert_loader")
from loader_cases import Loading, Packed, Stored

from sgl_batch.errors import EngineError
from sgl_batch.weights.expert_checkpoint import ExpertLocations
from sgl_batch.weights.expert_slots import ExpertSlots, SlotTensors


def small(folder: Path) -> Stored:
    return Stored.random(folder, experts=6, inter=48, hidden=70)


def test_a_file_that_is_cut_short_is_named_and_its_other_experts_are_read(tmp_path: Path) -> None:
    stored = small(tmp_path)
    loading = Loading.start(stored, slots=6, threads=3)
    cut_expert = stored.last_in_file(1)
    content = Path(stored.files[1]).read_bytes()
    os.truncate(stored.files[1], len(content) - 1)
    loading.ask(range(6), range(6))
    with pytest.raises(
        RuntimeError, match=rf"experts-1\.bin has only {len(content) - 1} bytes: 1 from .* something has cut it short"
    ):
        loading.wait(cut_expert)
    rest = [slot for slot in range(6) if slot != cut_expert]
    loading.wait(*rest)
    assert all(loading.holds(slot, slot) for slot in rest)
    os.truncate(stored.files[1], 0)
    loading.ask(rest, rest)
    with pytest.raises(RuntimeError, match=r"experts-1\.bin has only 0 bytes"):
        loading.wait(*rest)
    for slot in rest:
        with suppress(RuntimeError):
            loading.wait(slot)
    Path(stored.files[1]).write_bytes(content)
    loading.ask([cut_expert], [cut_expert])
    loading.wait(cut_expert)
    assert loading.holds(cut_expert, cut_expert), "a slot that failed can be asked for again"


def test_the_error_of_a_models_expert_slots_names_the_file(tmp_path: Path) -> None:
    stored = small(tmp_path)
    locations = ExpertLocations(
        files=stored.files, file_offsets=stored.file_offsets[None], dtype=torch.bfloat16, hidden=70, inter=48
    )
    packed = Packed.empty(6, stored, torch.bfloat16)
    slots = ExpertSlots(locations, SlotTensors(w13=packed.w13, w2=packed.w2), num_threads=2)
    os.truncate(stored.files[0], 10)
    slots.ask(0, range(6), urgent=True)
    with pytest.raises(EngineError, match=rf"weights .* could not be read: {stored.files[0]} has only 10 bytes"):
        slots.wait(0, range(6))
    Path(stored.files[0]).unlink()
    with pytest.raises(EngineError, match=rf"could not be read: opening {stored.files[0]}: No such file"):
        ExpertSlots(locations, SlotTensors(w13=packed.w13, w2=packed.w2), num_threads=2)


def own_threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:
            continue  # the thread has ended
    return [name for name in names if name.startswith("sgl-weights")]


def open_files(folder: Path) -> list[str]:
    paths = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [path for path in paths if path.startswith(str(folder))]


def test_closing_while_experts_are_loaded_leaves_no_thread_and_no_file_open(tmp_path: Path) -> None:
    stored = Stored.random(tmp_path, experts=8, inter=400, hidden=500)
    before = len(own_threads())  # loaders of a failed test may have left some
    for _ in range(10):
        loading = Loading.start(stored, slots=8, threads=3)
        assert len(own_threads()) == before + 3
        assert len(open_files(tmp_path)) == 2
        outcome: list[str] = []

        def wait_for_all(loading: Loading = loading, outcome: list[str] = outcome) -> None:
            try:
                loading.wait(*range(8))
                outcome.append("all loaded")
            except ValueError as error:
                outcome.append(str(error))

        loading.ask(range(8), range(8))
        waiter = threading.Thread(target=wait_for_all)
        waiter.start()
        loading.loader.close()
        waiter.join(60)
        assert outcome == ["all loaded"] or "the loader is closed" in outcome[0]
        loading.loader.close()
        del loading, wait_for_all
        assert (len(own_threads()), open_files(tmp_path)) == (before, [])


# Preloaded before libc: a case decides through switches what opens and reads of the files of experts do.
_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int shim_most, shim_fail_from, shim_no_direct_open, shim_no_direct_read, shim_closed, shim_interrupt;
int shim_calls, shim_waiting;
long shim_order[64];
static int ours(const char* path) { return strstr(path, "experts-") != NULL; }
static int ours_fd(int fd) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return ours(path);
}
#define OPEN(NAME) \
  int NAME(const char* path, int flags, ...) { \
    int (*real)(const char*, int, ...) = dlsym(RTLD_NEXT, #NAME); \
    va_list rest; \
    va_start(rest, flags); \
    const int mode = (flags & O_CREAT) ? va_arg(rest, int) : 0; \
    va_end(rest); \
    if (shim_no_direct_open && (flags & O_DIRECT) && ours(path)) { errno = EINVAL; return -1; } \
    return real(path, flags, mode); \
  }
OPEN(open) OPEN(open64)
#define PREAD(NAME) \
  ssize_t NAME(int fd, void* to, size_t size, off_t at) { \
    ssize_t (*real)(int, void*, size_t, off_t) = dlsym(RTLD_NEXT, #NAME); \
    if (!ours_fd(fd)) return real(fd, to, size, at); \
    const int call = __atomic_fetch_add(&shim_calls, 1, __ATOMIC_SEQ_CST); \
    if (call < 64) shim_order[call] = at; \
    while (__atomic_load_n(&shim_closed, __ATOMIC_SEQ_CST)) { \
      __atomic_store_n(&shim_waiting, 1, __ATOMIC_SEQ_CST); \
      usleep(1000); \
    } \
    if (shim_interrupt && call % 3 == 0) { errno = EINTR; return -1; } \
    if (shim_fail_from && call >= shim_fail_from) { errno = EIO; return -1; } \
    if (shim_no_direct_read && (fcntl(fd, F_GETFL) & O_DIRECT)) { errno = EINVAL; return -1; } \
    const ssize_t got = real(fd, to, size, at); \
    return shim_most && got > shim_most ? shim_most : got; \
  }
PREAD(pread) PREAD(pread64)
"""


@pytest.fixture(scope="module")
def shim_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function that gives the result of a case of loader_with_shim.py; one process runs all cases."""
    folder = tmp_path_factory.mktemp("shim")
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(_SHIM, encoding="utf-8")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    command = [sys.executable, str(Path(__file__).with_name("loader_with_shim.py")), str(library), str(folder)]
    environment = {**os.environ, "LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {library}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return lambda name: found[name]


def test_urgent_experts_are_read_first_hurried_ones_next_and_dropped_ones_never(
    shim_case: Callable[[str], Any],
) -> None:
    case = shim_case("order")
    assert case["begun"] == [0], "the only thread reads the expert asked for first"
    assert case["refused"] == "slot 1 waits for an expert already"
    assert case["dropped"] == [False, True, False], "an expert that is being read, or was not asked for, is not dropped"
    assert case["read"] == [0, 6, 4, 1, 5], "the call with 3 was refused as a whole, and 2 was dropped"
    assert case["holds"]


def test_short_and_interrupted_reads_are_continued(shim_case: Callable[[str], Any]) -> None:
    assert shim_case("5000 bytes at once") == {"holds": True, "direct": shim_case("direct here")}
    assert shim_case("1000 bytes at once") == {"holds": True, "direct": False}, "a direct read must begin at a block"
    assert shim_case("interrupted") == {"holds": True, "direct": shim_case("direct here")}


def test_a_file_system_without_direct_reads_is_read_through_its_cache(shim_case: Callable[[str], Any]) -> None:
    assert shim_case("no direct open") == {"holds": True, "direct": False}
    assert shim_case("no direct read") == {"holds": True, "direct": False}


def test_an_error_of_the_device_names_file_and_bytes_and_other_reads_go_on(shim_case: Callable[[str], Any]) -> None:
    case = shim_case("error")
    assert "reading " in case["messages"]
    assert f"experts-0.bin: {os.strerror(errno.EIO)}" in case["messages"]
    assert case["errors"] >= 1
    assert case["holds_later"]


def test_close_waits_for_the_expert_that_is_being_read_and_drops_the_others(shim_case: Callable[[str], Any]) -> None:
    case = shim_case("close")
    assert case["ended_before_the_read"] is False
    assert case["message"] == "slot 1: the loader is closed"
    assert case["reads"] == 3, "only the three matrices of the expert that was being read"
