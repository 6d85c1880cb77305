"""Short reads, errors, file systems that cannot do this or that, an early end: told, or overcome to the last bit."""

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
    lost = stored.last_in_file(1)
    content = Path(stored.files[1]).read_bytes()
    os.truncate(stored.files[1], len(content) - 1)
    loading.ask(range(6), range(6))
    with pytest.raises(
        RuntimeError, match=rf"experts-1\.bin has only {len(content) - 1} bytes: 1 from .* something has cut it short"
    ):
        loading.wait(lost)
    rest = [slot for slot in range(6) if slot != lost]
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
    loading.ask([lost], [lost])
    loading.wait(lost)
    assert loading.holds(lost, lost), "a slot that failed can be asked for again"


def test_the_slots_of_a_model_say_which_file_could_not_be_read(tmp_path: Path) -> None:
    stored = small(tmp_path)
    locations = ExpertLocations(
        files=stored.files, file_offsets=stored.places[None], dtype=torch.bfloat16, hidden=70, inter=48
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
            continue  # it has ended meanwhile
    return [name for name in names if name.startswith("sgl-weights")]


def open_files(folder: Path) -> list[str]:
    paths = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [path for path in paths if path.startswith(str(folder))]


def test_closing_while_experts_are_loaded_leaves_no_thread_and_no_file_open(tmp_path: Path) -> None:
    stored = Stored.random(tmp_path, experts=8, inter=400, hidden=500)
    before = len(own_threads())  # of loaders that a failed test has left
    for _ in range(10):
        loading = Loading.start(stored, slots=8, threads=3)
        assert len(own_threads()) == before + 3
        assert len(open_files(tmp_path)) == 2
        told: list[str] = []

        def wait_for_all(loading: Loading = loading, told: list[str] = told) -> None:
            try:
                loading.wait(*range(8))
                told.append("all there")
            except ValueError as error:
                told.append(str(error))

        loading.ask(range(8), range(8))
        waiter = threading.Thread(target=wait_for_all)
        waiter.start()
        loading.loader.close()
        waiter.join(60)
        assert told == ["all there"] or "the loader is closed" in told[0]
        loading.loader.close()
        del loading, wait_for_all
        assert (len(own_threads()), open_files(tmp_path)) == (before, [])


# Opens and reads of the files of experts go as the test says that has this library before libc.
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
def below_shim(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a case of loader_below_shim.py found, by its name; one process runs all of them."""
    folder = tmp_path_factory.mktemp("shim")
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(_SHIM, encoding="utf-8")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    command = [sys.executable, str(Path(__file__).with_name("loader_below_shim.py")), str(library), str(folder)]
    surroundings = {**os.environ, "LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {library}"}
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return lambda name: found[name]


def test_urgent_experts_come_first_hurried_ones_next_and_dropped_ones_never(below_shim: Callable[[str], Any]) -> None:
    case = below_shim("order")
    assert case["begun"] == [0], "one thread, which has begun the first that was asked for"
    assert case["refused"] == "slot 1 waits for an expert already"
    assert case["dropped"] == [False, True, False], "what is being read and what is not asked for stays"
    assert case["read"] == [0, 6, 4, 1, 5], "3 was refused with the whole call, and 2 dropped"
    assert case["holds"]


def test_reads_that_do_less_than_asked_are_continued(below_shim: Callable[[str], Any]) -> None:
    assert below_shim("5000 bytes at once") == {"holds": True, "direct": below_shim("direct here")}
    assert below_shim("1000 bytes at once") == {"holds": True, "direct": False}, "a direct read begins at a block"
    assert below_shim("interrupted") == {"holds": True, "direct": below_shim("direct here")}


def test_a_file_system_that_cannot_read_past_its_cache_is_read_through_it(below_shim: Callable[[str], Any]) -> None:
    assert below_shim("no direct open") == {"holds": True, "direct": False}
    assert below_shim("no direct read") == {"holds": True, "direct": False}


def test_an_error_of_the_device_names_file_and_bytes_and_other_reads_go_on(below_shim: Callable[[str], Any]) -> None:
    case = below_shim("error")
    assert "reading " in case["told"]
    assert f"experts-0.bin: {os.strerror(errno.EIO)}" in case["told"]
    assert case["errors"] >= 1
    assert case["holds_later"]


def test_closing_waits_for_what_is_being_read_and_leaves_out_the_rest(below_shim: Callable[[str], Any]) -> None:
    case = below_shim("close")
    assert case["ended_before_the_read"] is False
    assert case["told"] == "slot 1: the loader is closed"
    assert case["reads"] == 3, "the three matrices of the expert that was begun"
