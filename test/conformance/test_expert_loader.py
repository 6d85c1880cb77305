"""Slots hold exactly what packing the plain matrices would give, however the files are read and whatever goes wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sgl_batch_kernel.expert_loader")
from loader_cases import Loading, Packed, Stored
from sgl_batch_kernel import experts as run_experts

from sgl_batch.errors import EngineError
from sgl_batch.mem_cache.expert_checkpoint import ExpertPlaces
from sgl_batch.mem_cache.expert_slots import ExpertSlots, SlotTensors

HERE = Path(__file__).parent
# Inputs and channels: whole panels, odd ones, less than a panel, more than one read (2 MiB), a panel of more than one.
SIZES = ((64, 32), (100, 50), (34, 2), (1030, 1100), (33_000, 34))
FORMS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.int8),
    (torch.float32, torch.int8),
)


def small(folder: Path, *, experts: int = 6, seed: int = 0) -> Stored:
    return Stored.random(folder, experts=experts, inter=48, hidden=70, seed=seed)


@pytest.mark.parametrize(("stored_dtype", "dtype"), FORMS, ids=str)
@pytest.mark.parametrize(("hidden", "inter"), SIZES)
def test_a_slot_holds_the_bits_of_packing_the_plain_matrices(
    hidden: int, inter: int, stored_dtype: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    stored = Stored.random(tmp_path, experts=2, inter=inter, hidden=hidden, dtype=stored_dtype, seed=hidden)
    for direct in (True, False):
        loading = Loading.start(stored, slots=4, dtype=dtype, direct=direct)
        assert direct or not loading.loader.direct()
        loading.ask([2, 0], [0, 1], urgent=False)
        loading.wait(0, 2)
        assert loading.holds(2, 0)
        assert loading.holds(0, 1)
        assert loading.untouched(1), "a slot that was not asked for is nobody's"
        assert loading.untouched(3)
        size, experts, dropped, errors, *_ = loading.loader.totals()
        assert (size, experts, dropped, errors) == (2 * stored.expert_bytes, 2, 0, 0)
        loading.loader.close()


def test_rows_of_zeros_and_of_the_smallest_numbers_become_the_int8_of_resident_weights(tmp_path: Path) -> None:
    rows = torch.zeros(4, 70)
    rows[1, 3], rows[2, 5], rows[3, 7] = 1e-45, -1e-43, 3e38
    stored = Stored.random(tmp_path, experts=6, inter=48, hidden=70, dtype=torch.float32)
    file, offset = stored.places[2, 0].tolist()
    stored.w13[2, :4] = rows
    with open(stored.files[file], "r+b") as opened:
        opened.seek(offset)
        opened.write(stored.w13[2, :48].contiguous().numpy().tobytes())
    loading = Loading.start(stored, slots=1, dtype=torch.int8)
    loading.ask([0], [2])
    loading.wait(0)
    assert loading.holds(0, 2)


def test_what_a_caller_does_wrong_is_refused_and_nothing_has_changed(tmp_path: Path) -> None:
    loading = Loading.start(small(tmp_path), slots=4)
    for slots, experts in (([-1], [0]), ([4], [0]), ([2, 1, 2], [0, 1, 2])):
        with pytest.raises(ValueError, match="slot"):
            loading.ask(slots, experts)
    for wrong in ([2, 0], [-1, 0], [0, -1]):
        places = loading.stored.places[:2].clone()
        places[1, 2] = torch.tensor(wrong)
        with pytest.raises(ValueError, match=r"byte -?\d+ of file -?\d+ of 2"):
            loading.loader.submit(torch.tensor([0, 1]), places, True)
    with pytest.raises(ValueError, match="places are"):
        loading.loader.submit(torch.tensor([0, 1]), loading.stored.places[:1], True)
    for slot in range(4):
        with pytest.raises(ValueError, match=f"slot {slot} is empty"):
            loading.wait(slot)
        assert loading.untouched(slot)
    for call in (loading.wait, loading.drop, loading.hurry):
        with pytest.raises(ValueError, match="slot 4 of 4"):
            call(4)
    assert loading.drop(0, 1) == [False, False], "what is not asked for is not left out"
    loading.loader.close()
    with pytest.raises(ValueError, match="closed"):
        loading.ask([0], [0])


def test_slots_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    stored = small(tmp_path)
    with pytest.raises(ValueError, match="0 threads"):
        Loading.start(stored, slots=2, threads=0)
    with pytest.raises(ValueError, match="another number type"):
        Loading.start(stored, slots=2, dtype=torch.float32)
    odd = Stored.random(tmp_path, experts=2, inter=5, hidden=8)
    with pytest.raises(ValueError, match="even numbers"):
        Loading.start(odd, slots=2, dtype=torch.int8)


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
    places = ExpertPlaces(files=stored.files, places=stored.places[None], dtype=torch.bfloat16, hidden=70, inter=48)
    packed = Packed.empty(6, stored, torch.bfloat16)
    slots = ExpertSlots(places, SlotTensors(w13=packed.w13, w2=packed.w2), num_threads=2)
    os.truncate(stored.files[0], 10)
    slots.ask(0, range(6), urgent=True)
    with pytest.raises(EngineError, match=rf"weights .* could not be read: {stored.files[0]} has only 10 bytes"):
        slots.wait(0, range(6))
    Path(stored.files[0]).unlink()
    with pytest.raises(EngineError, match=rf"could not be read: opening {stored.files[0]}: No such file"):
        ExpertSlots(places, SlotTensors(w13=packed.w13, w2=packed.w2), num_threads=2)


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


class Drives:
    """Random calls from one thread on slots that are its own; after each wait the slot's bits are looked at."""

    def __init__(self, loading: Loading, slots: range, seed: str) -> None:
        self.loading, self.slots, self.rng = loading, slots, random.Random(seed)
        self.pending: dict[int, int] = {}
        self.checked, self.faults = 0, list[str]()

    def run(self, until: float) -> None:
        try:
            while time.monotonic() < until:
                self.rng.choice((self.ask, self.ask, self.wait, self.drop, self.hurry))()
            self.wait(len(self.pending))
        except Exception as error:  # noqa: BLE001 (reported by the test, which waits for this thread)
            self.faults.append(repr(error))

    def ask(self) -> None:
        free = [slot for slot in self.slots if slot not in self.pending]
        slots = self.rng.sample(free, self.rng.randint(0, len(free)))
        experts = [self.rng.randrange(len(self.loading.stored.w2)) for _ in slots]
        if slots:
            self.loading.ask(slots, experts, urgent=self.rng.random() < 0.5)
        self.pending.update(zip(slots, experts, strict=True))

    def wait(self, number: int | None = None) -> None:
        slots = self.rng.sample(
            list(self.pending), self.rng.randint(0, len(self.pending)) if number is None else number
        )
        self.loading.wait(*slots)
        for slot in slots:
            expert = self.pending.pop(slot)
            self.checked += 1
            if not self.loading.holds(slot, expert):
                self.faults.append(f"slot {slot} does not hold expert {expert}")

    def drop(self) -> None:
        slots = self.rng.sample(list(self.pending), self.rng.randint(0, len(self.pending)))
        for slot, dropped in zip(slots, self.loading.drop(*slots), strict=True):
            if dropped:
                del self.pending[slot]

    def hurry(self) -> None:
        self.loading.hurry(*self.rng.sample(list(self.slots), 3))


def test_random_calls_of_several_threads_fill_every_slot_with_what_was_asked_for(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    stored = Stored.random(tmp_path, experts=24, inter=90, hidden=130)
    loading = Loading.start(stored, slots=24, dtype=torch.int8, threads=4)
    until = time.monotonic() + 2.0
    drives = [Drives(loading, range(8 * part, 8 * part + 8), f"{seed} {part}") for part in range(3)]
    threads = [threading.Thread(target=drive.run, args=(until,)) for drive in drives]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [drive.faults for drive in drives] == [[], [], []], f"seed {seed}"
    size, experts, dropped, errors, *_ = loading.loader.totals()
    assert all(drive.checked > 20 for drive in drives), f"seed {seed}"
    assert experts == sum(drive.checked for drive in drives), f"seed {seed}: each is loaded once, and {dropped} not"
    assert (size, errors) == (experts * stored.expert_bytes, 0), f"seed {seed}"


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
    place = tmp_path_factory.mktemp("shim")
    source, library = place / "shim.c", place / "shim.so"
    source.write_text(_SHIM, encoding="utf-8")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    command = [sys.executable, str(HERE / "loader_below_shim.py"), str(library), str(place)]
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_experts_in_slots_compute_the_bits_of_experts_in_their_order(dtype: torch.dtype, tmp_path: Path) -> None:
    number, slots = 9, 13
    stored = Stored.random(tmp_path, experts=number, inter=50, hidden=68, dtype=torch.float32)
    if dtype == torch.bfloat16:
        stored = Stored.random(tmp_path, experts=number, inter=50, hidden=68)
    resident = Packed.of(stored, dtype)
    where = torch.randperm(slots)[:number].to(torch.int32)
    where[4] = -1
    held = Packed.empty(slots, stored, dtype)
    for expert, slot in enumerate(where.tolist()):
        if slot >= 0:
            for to, of in zip(held.slot(slot), resident.slot(expert), strict=True):
                to.copy_(of)
    x = torch.randn(40, 68).to(stored.w13.dtype)
    ids = torch.stack([torch.randperm(number)[:3] for _ in range(40)]).to(torch.int32)
    ids[ids == 4] = -1
    weights = torch.rand(40, 3)

    def computed(packed: Packed, **where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = {"w13_scales": packed.w13_scales, "w2_scales": packed.w2_scales}
        return run_experts(x, packed.w13, packed.w2, weights, ids, **scales, **where)

    for found, expected in zip(computed(held, slots=where), computed(resident), strict=True):
        assert torch.equal(found, expected)
    ids[7, 0] = 4
    with pytest.raises(ValueError, match="expert 4 has 1 rows and no slot"):
        computed(held, slots=where)
    where[4] = slots
    with pytest.raises(RuntimeError, match=f"expert 4 lies in slot {slots} of {slots}"):
        computed(held, slots=where)
    with pytest.raises(RuntimeError, match="use int32"):
        computed(held, slots=where.long())
