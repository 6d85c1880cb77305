"""Only the owner can read files in the jobs directory, whatever the umask and the directory's mode are."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_service import create, lines, service_in, until
from scripted_engines import ScriptedSource

OTHERS = 0o077


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(directory: Path) -> dict[str, str]:
    """Return the files and folders that others than the owner may use in any way."""
    return {
        str(path.relative_to(directory)): oct(stat.S_IMODE(path.stat().st_mode))
        for path in directory.rglob("*")
        if path.stat().st_mode & OTHERS
    }


def test_all_files_of_a_service_are_private_in_a_directory_that_is_not(tmp_path: Path) -> None:
    async def check() -> None:
        jobs = tmp_path / "jobs"
        jobs.mkdir(mode=0o755)
        found: set[str] = set()

        async def look(*_: object) -> None:
            found.update(path.name if path.parent == jobs else path.parent.name for path in jobs.rglob("*"))
            assert open_to_others(jobs) == {}

        async with service_in(tmp_path, ScriptedSource(look)) as service:
            first = await create(service, lines(20))
            await until(service, first.id)
            await until(service, (await create(service, lines(20))).id)
            async with await service.begin_upload() as uploading:
                await uploading.write(b"x" * (2 << 20))
                assert list((jobs / "partial").iterdir())
                assert open_to_others(jobs) == {}
        assert {"jobs.sqlite", "jobs.sqlite-wal", "jobs.sqlite-shm", "lock", "segments", "files"} <= found
        assert open_to_others(jobs) == {}
        assert stat.S_IMODE(jobs.stat().st_mode) == 0o755, "the mode of the directory itself is the operator's choice"

    asyncio.run(check())


def test_files_of_a_wider_mode_are_tightened_at_the_start(tmp_path: Path) -> None:
    async def check() -> None:
        async with service_in(tmp_path) as service:
            await until(service, (await create(service, lines(3))).id)
        jobs = tmp_path / "jobs"
        for path in jobs.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (jobs / "jobs.sqlite-wal").touch(mode=0o644)
        async with service_in(tmp_path):
            assert open_to_others(jobs) == {}

    asyncio.run(check())
