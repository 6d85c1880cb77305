"""System errors are raised by wait, with path, sizes and remedy; the engine goes on with the next copy."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from store_cases import FORMS, Form, PlainPool, prepared, store_and_engine, stored

from sgl_batch.errors import ConfigError
from sgl_batch.kv_offload.host_kv_store import HostKVStore
from sgl_batch.kv_offload.store_errors import CopyError
from sgl_batch.kv_offload.store_geometry import StoreGeometry

pytest.importorskip("sgl_batch_kernel.kv_store")
FILES = [form for form in FORMS if form.kind == "file"]
MIB = 1 << 20


@contextmanager
def limited(kind: int, num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@pytest.mark.parametrize("form", FILES, ids=str)
def test_a_full_disk_is_reported_with_a_remedy_and_later_copies_work(form: Form, small_disk: Path) -> None:
    pool = PlainPool.random(layers=2, part_bytes=(MIB // 2,), pages=4)
    with store_and_engine(form, pool, small_disk, num_blocks=4) as (store, engine):
        (small_disk / "of another program").write_bytes(bytes(6 * MIB))
        blocks = prepared(store, 4)
        ticket = engine.store_pages(range(2), range(4), blocks)
        with pytest.raises(CopyError) as caught:
            ticket.wait()
        assert caught.value.errno == errno.ENOSPC
        message = str(caught.value)
        assert f"of the file {small_disk}/sgl-batch-kv-store-" in message
        assert (
            "No space left on device; the whole store needs 2097152 bytes more, and its file system has 0 free"
            in message
        )
        assert "name another directory (--kv-store-dir) or a smaller store (--kv-store-bytes)" in message
        (small_disk / "of another program").unlink()
        engine.store_pages(range(2), range(4), blocks).wait()
        assert engine.counters().errors == 1


def test_a_store_that_does_not_fit_on_its_disk_is_refused_with_both_sizes(small_disk: Path) -> None:
    geometry = StoreGeometry(num_layers=1, part_bytes=(MIB,))
    with pytest.raises(
        ConfigError, match=r"needs 9437184 bytes in .*disk \(--kv-store-dir\), of which 8388608 are free"
    ):
        HostKVStore.create(geometry, num_bytes=9 * MIB, directory=small_disk)


@pytest.mark.parametrize("form", FILES, ids=str)
def test_a_file_size_limit_is_reported_and_blocks_below_it_still_work(form: Form, tmp_path: Path) -> None:
    pool = PlainPool.random(layers=2, part_bytes=(MIB // 2,), pages=4)
    with store_and_engine(form, pool, tmp_path, num_blocks=4) as (store, engine):
        blocks = sorted(prepared(store, 4).tolist())
        with limited(resource.RLIMIT_FSIZE, 2 * MIB + 100):
            with pytest.raises(CopyError, match=r"to slot 2: .*File too large; lift the limit .*ulimit -f") as caught:
                engine.store_pages(range(2), [2], blocks[2:3]).wait()
            assert caught.value.errno == errno.EFBIG
            engine.store_pages(range(2), [0, 1], blocks[:2]).wait()
        store.complete_store(blocks[:2])
        engine.load_pages(range(2), blocks[:2], [2, 3]).wait()
        assert all((new == old).all() for new, old in zip(pool.page(3), pool.page(1), strict=True))


def test_a_store_over_the_file_size_limit_is_refused(tmp_path: Path) -> None:
    geometry = StoreGeometry(num_layers=1, part_bytes=(MIB,))
    with limited(resource.RLIMIT_FSIZE, 2 * MIB), pytest.raises(ConfigError, match=r"of 4194304 bytes .*ulimit -f"):
        HostKVStore.create(geometry, num_bytes=4 * MIB, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_store_beyond_the_address_space_limit_is_refused() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + 64 * MIB
    with limited(resource.RLIMIT_AS, limit), pytest.raises(ConfigError, match=r"268435456 bytes .*ulimit -v"):
        HostKVStore.create(StoreGeometry(num_layers=1, part_bytes=(MIB,)), num_bytes=256 * MIB)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot make a file in .*nowhere .*--kv-store-dir"):
        HostKVStore.create(
            StoreGeometry(num_layers=1, part_bytes=(MIB,)), num_bytes=4 * MIB, directory=tmp_path / "nowhere"
        )


@pytest.mark.parametrize("form", FILES, ids=str)
def test_a_truncated_file_is_an_error_only_for_its_missing_blocks(form: Form, tmp_path: Path) -> None:
    pool = PlainPool.random(layers=2, part_bytes=(4096,), pages=8)
    with store_and_engine(form, pool, tmp_path, num_blocks=4) as (store, engine):
        blocks = sorted(stored(store, engine, [0, 1, 2, 3]).tolist())
        os.truncate(store.address.data_path, 2 * store.geometry.block_bytes + 4096)
        with pytest.raises(
            CopyError, match=r"from slot 3: .* has only 20480 bytes: 8192 from byte 24576 .*cut it short"
        ):
            engine.load_pages(range(2), blocks[3:], [7]).wait()
        with pytest.raises(CopyError, match=r"from slot 2: .*: 4096 from byte 20480"):
            engine.load_pages(range(2), blocks[2:3], [6]).wait()
        engine.load_pages(range(2), blocks[:2], [4, 5]).wait()
        assert engine.counters().errors == 2


def _damage(form: Form, store: HostKVStore, at: int) -> None:
    """Change one bit of the stored data."""
    if form.kind != "file":
        store.memory()[at] ^= 1
        return
    with open(store.address.data_path, "r+b", buffering=0) as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_checksum_finds_a_single_changed_bit_and_names_block_and_layer(form: Form, tmp_path: Path) -> None:
    pool = PlainPool.random(layers=3, part_bytes=(1000, 200), pages=8)
    with store_and_engine(form, pool, tmp_path, checksums=True, num_blocks=4) as (store, engine):
        blocks = sorted(stored(store, engine, [0, 1, 2, 3]).tolist())
        geometry = store.geometry
        _damage(form, store, 2 * geometry.block_bytes + geometry.layer_bytes + geometry.part_offsets[1] + 199)
        with pytest.raises(CopyError, match=r"from slot 2: the checksum of layer 1 does not match") as caught:
            engine.load_pages(range(3), blocks[2:3], [4]).wait()
        assert caught.value.errno is None
        engine.load_pages(range(2, 3), blocks[2:3], [4]).wait()
        engine.load_pages(range(3), [blocks[0], blocks[1], blocks[3]], [4, 5, 6]).wait()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_checksum_finds_a_layer_left_from_an_earlier_use_of_the_block(form: Form, tmp_path: Path) -> None:
    pool = PlainPool.random(layers=3, part_bytes=(4096,), pages=8)
    with store_and_engine(form, pool, tmp_path, checksums=True, num_blocks=1) as (store, engine):
        store.free(stored(store, engine, [0]))
        blocks = prepared(store, 1)
        engine.store_pages(range(2), [0], blocks).wait()
        store.complete_store(blocks)
        engine.load_pages(range(2), blocks, [1]).wait()
        with pytest.raises(CopyError, match="the checksum of layer 2 does not match"):
            engine.load_pages(range(3), blocks, [1]).wait()


# Preloaded before libc: each call on the store's file moves at most 1,000 bytes, and every third is interrupted.
_SHORT_CALLS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
static int ours(int fd) {
  char link[64], path[256];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return strstr(path, "sgl-batch-kv-store-") != NULL;
}
static int calls;
#define SHORT(NAME) \
  ssize_t NAME(int fd, const struct iovec* pieces, int count, off_t at) { \
    ssize_t (*real)(int, const struct iovec*, int, off_t) = dlsym(RTLD_NEXT, #NAME); \
    if (!ours(fd)) return real(fd, pieces, count, at); \
    if (++calls % 3 == 0) { errno = EINTR; return -1; } \
    if (getenv("FAIL_AFTER") && calls > atoi(getenv("FAIL_AFTER"))) { errno = EIO; return -1; } \
    struct iovec first = pieces[0]; \
    if (first.iov_len > 1000) first.iov_len = 1000; \
    return real(fd, &first, 1, at); \
  }
SHORT(preadv) SHORT(pwritev) SHORT(preadv64) SHORT(pwritev64)
"""


@pytest.fixture(scope="module")
def short_calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library preloaded before libc, whose reads and writes are short."""
    folder = tmp_path_factory.mktemp("short_calls")
    source, library = folder / "short_calls.c", folder / "short_calls.so"
    source.write_text("#include <stdio.h>\n" + _SHORT_CALLS, encoding="utf-8")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def _run_with(library: Path, tmp_path: Path, **environment: str) -> str:
    command = [sys.executable, str(Path(__file__).parent / "store_round_trip.py"), str(tmp_path)]
    full_environment = {**os.environ, "LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {library}", **environment}
    done = subprocess.run(command, env=full_environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_short_reads_and_writes_are_continued(short_calls: Path, tmp_path: Path) -> None:
    assert _run_with(short_calls, tmp_path) == "equal\n"


def test_a_device_error_is_raised_by_wait_with_its_errno(short_calls: Path, tmp_path: Path) -> None:
    message = _run_with(short_calls, tmp_path, FAIL_AFTER="20")
    assert message.startswith(f"errno {errno.EIO}: layers 0 to 1 of device page 0 to slot 0: writing ")
    assert "Input/output error" in message
