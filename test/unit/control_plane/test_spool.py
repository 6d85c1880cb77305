"""A spool gives every answer until it is acknowledged, across incarnations, torn records and full disks."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.control_plane.instances import spool as spool_module
from sgl_batch.control_plane.instances import spool_files
from sgl_batch.control_plane.instances.messages import Answered
from sgl_batch.control_plane.instances.spool import KEPT_S, Spool
from sgl_batch.errors import ConfigError

ALL = 1 << 40


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write without a pause between groups."""
    monkeypatch.setattr(spool_module, "_GROUP_EVERY_S", 0.0)


async def visible(spool: Spool, *keys: str, body: bytes = b"{}") -> None:
    """Add answers, and wait until they are visible."""
    news, waits_for = asyncio.Event(), len(spool) + len(keys)
    spool.on_news = news.set
    for key in keys:
        spool.add(key, 200, f"req_{key}", body)
    while len(spool) < waits_for:
        await news.wait()
        news.clear()


async def keys_of(spool: Spool, after: int = 0) -> list[str]:
    return [one.key for one in await spool.unacknowledged(after, ALL)]


def with_spools(directory: Path, *scenarios: Callable[[Spool], Awaitable[None]], **options: int) -> None:
    """Run each scenario with a spool of the next incarnation."""

    async def run(incarnation: int, scenario: Callable[[Spool], Awaitable[None]]) -> None:
        spool = Spool(directory, incarnation, first_retry_s=0.01, **options)
        try:
            await scenario(spool)
        finally:
            await spool.close(10)

    for incarnation, scenario in enumerate(scenarios, 1):
        asyncio.run(run(incarnation, scenario))


def test_answers_are_numbered_from_one_without_gaps_in_the_order_of_their_addition(tmp_path: Path) -> None:
    async def scenario(spool: Spool) -> None:
        await visible(spool, "a", "b")
        await visible(spool, "c", body=b'{"x":1}')
        assert await spool.unacknowledged(1, ALL) == (
            Answered(2, "b", 200, "req_b", b"{}"),
            Answered(3, "c", 200, "req_c", b'{"x":1}'),
        )

    with_spools(tmp_path, scenario)


def test_an_answer_is_not_visible_before_the_disk_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    whole = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: (whole(file), synced.append(file))[0])

    async def scenario(spool: Spool) -> None:
        spool.add("a", 200, "id", b"{}")
        assert await keys_of(spool) == []
        assert spool.holds("a")
        await visible(spool, "b")
        assert await keys_of(spool) == ["a", "b"]
        assert len(synced) <= 2, "answers that wait together are synced together"
        assert synced

    with_spools(tmp_path, scenario)


def test_a_report_is_bounded_but_never_empty_where_there_is_an_answer(tmp_path: Path) -> None:
    async def scenario(spool: Spool) -> None:
        await visible(spool, "a", "b", "c", body=b"x" * 100)
        assert len(await spool.unacknowledged(0, 10)) == 1
        assert len(await spool.unacknowledged(0, 250)) == 2

    with_spools(tmp_path, scenario)


@pytest.mark.parametrize("memory_bytes", [1 << 20, 0])
def test_the_next_incarnation_has_what_was_not_acknowledged(tmp_path: Path, memory_bytes: int) -> None:
    async def first(spool: Spool) -> None:
        await visible(spool, "a", "b", "c")
        spool.acknowledge(["b"], up_to=3)

    async def second(spool: Spool) -> None:
        assert await spool.unacknowledged(0, ALL) == (
            Answered(1, "a", 200, "req_a", b"{}"),
            Answered(2, "c", 200, "req_c", b"{}"),
        )
        await visible(spool, "d")
        spool.acknowledge(["a"], up_to=2)

    async def third(spool: Spool) -> None:
        assert await keys_of(spool) == ["c", "d"]

    with_spools(tmp_path, first, second, third, memory_bytes=memory_bytes)


def test_a_torn_last_record_is_left_out_and_a_changed_one_ends_its_segment(tmp_path: Path) -> None:
    async def first(spool: Spool) -> None:
        await visible(spool, "a", "b")

    async def second(spool: Spool) -> None:
        assert await keys_of(spool) == ["a"]

    async def third(spool: Spool) -> None:
        assert await keys_of(spool) == []

    with_spools(tmp_path, first)
    (segment,) = tmp_path.iterdir()
    os.truncate(segment, segment.stat().st_size - 1)
    with_spools(tmp_path, second)
    data = bytearray(segment.read_bytes())
    data[len(spool_files._MAGIC) + 9] ^= 1
    segment.write_bytes(data)
    with_spools(tmp_path, third)


def test_an_old_process_that_still_writes_disturbs_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        old, new = Spool(tmp_path, 1), None
        await visible(old, "a")
        new = Spool(tmp_path, 2)
        await visible(old, "late")
        await visible(new, "b")
        assert await keys_of(new) == ["a", "b"]
        new.acknowledge(["a", "b"], up_to=2)
        await visible(old, "later")
        assert await keys_of(new) == []
        await old.close(10)
        await new.close(10)

    asyncio.run(scenario())


def test_a_segment_is_removed_when_all_of_its_answers_are_acknowledged(tmp_path: Path) -> None:
    async def scenario(spool: Spool) -> None:
        for key in "abc":
            await visible(spool, key, body=b"x" * 200)
        spool.acknowledge(["a", "b"], up_to=3)

    with_spools(tmp_path, scenario, segment_bytes=100)
    assert [path.name for path in tmp_path.iterdir()] == ["answers-00000001-000003"]


def test_the_same_incarnation_twice_begins_another_segment(tmp_path: Path) -> None:
    async def scenario() -> None:
        for key in "ab":
            spool = Spool(tmp_path, 1)
            await visible(spool, key)
            await spool.close(10)
        assert await keys_of(Spool(tmp_path, 1)) == ["a", "b"]

    asyncio.run(scenario())


def test_an_acknowledgement_concerns_only_answers_that_were_received(tmp_path: Path) -> None:
    """Another line of the same key gets the answer under a new number; the first line's commit leaves it there."""

    async def scenario(spool: Spool) -> None:
        await visible(spool, "a", "b")
        spool.again("a")
        assert await spool.unacknowledged(2, ALL) == (Answered(3, "a", 200, "req_a", b"{}"),)
        spool.acknowledge(["a"], up_to=2)
        assert await keys_of(spool) == ["b", "a"]
        spool.acknowledge(["a"], up_to=3)
        assert await keys_of(spool) == ["b"]
        assert not spool.holds("a")

    with_spools(tmp_path, scenario)


def test_answers_that_nobody_acknowledges_are_dropped_after_a_week(tmp_path: Path) -> None:
    now = 1e9

    async def scenario() -> None:
        nonlocal now
        spool = Spool(tmp_path, 1, clock=lambda: now)
        await visible(spool, "a")
        now += KEPT_S - 1
        await visible(spool, "b")
        assert await keys_of(spool) == ["a", "b"]
        now += 2
        assert await keys_of(spool) == ["b"]
        await spool.close(10)
        (segment,) = (path for path in tmp_path.iterdir() if "acknowledged" not in path.name)
        os.utime(segment, (now - KEPT_S - 1, now - KEPT_S - 1))
        late = Spool(tmp_path, 2, clock=lambda: now)
        assert len(late) == 0
        await late.close(10)

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


def test_answers_wait_for_a_full_disk_and_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_full = True
    whole = os.pwrite

    def write(file: int, data: bytes, offset: int) -> int:
        if is_full and offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(file, data, offset)

    monkeypatch.setattr(os, "pwrite", write)

    async def scenario(spool: Spool) -> None:
        nonlocal is_full
        news = asyncio.Event()
        spool.on_news = news.set
        spool.add("a", 200, "id", b"{}")
        await news.wait()
        assert "No space left" in (spool.message or "")
        spool.add("b", 200, "id", b"{}")
        assert await keys_of(spool) == []
        is_full = False
        while len(spool) < 2:
            news.clear()
            await news.wait()
        await visible(spool, "c")
        assert spool.message is None
        assert await keys_of(spool) == ["a", "b", "c"]

    with_spools(tmp_path, scenario)


def test_an_answer_that_the_disk_does_not_give_back_is_called_lost(tmp_path: Path) -> None:
    async def scenario(spool: Spool) -> None:
        lost: list[str] = []
        spool.on_lost = lambda key, why: lost.append(f"{key}: {why}")
        await visible(spool, "a")
        (segment,) = tmp_path.iterdir()
        os.truncate(segment, 30)
        assert await keys_of(spool) == []
        assert len(lost) == 1
        assert lost[0].startswith("a: ")
        assert not spool.holds("a")

    with_spools(tmp_path, scenario, memory_bytes=0)


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        Spool(tmp_path / "file", 1)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4)),
        st.tuples(st.just("acknowledge"), st.lists(st.sampled_from("abcdef"), max_size=4)),
        st.tuples(st.just("again"), st.lists(st.sampled_from("abcdef"), max_size=1)),
        st.tuples(st.just("reopen"), st.just([])),
    ),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(actions=ACTIONS, segment_bytes=st.sampled_from([1, 120, 1 << 20]), memory_bytes=st.sampled_from([0, 1 << 20]))
def test_what_was_added_and_not_acknowledged_is_there(
    actions: list[tuple[str, list[str]]], segment_bytes: int, memory_bytes: int
) -> None:
    async def run(directory: Path) -> None:
        incarnation, expected = 1, list[str]()
        options = {"segment_bytes": segment_bytes, "memory_bytes": memory_bytes}
        spool = Spool(directory, incarnation, **options)
        for action, keys in actions:
            await perform(spool, action, keys)
            expected = after(expected, action, keys)
            if action == "reopen":
                await spool.close(10)
                incarnation += 1
                spool = Spool(directory, incarnation, **options)
            assert sorted(await keys_of(spool)) == sorted(expected)
            numbers = [one.number for one in await spool.unacknowledged(0, ALL)]
            assert numbers == sorted(set(numbers))
        await spool.close(10)

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))


async def perform(spool: Spool, action: str, keys: Iterable[str]) -> None:
    if action == "add":
        await visible(spool, *keys)
    elif action == "acknowledge":
        spool.acknowledge(keys, ALL)
    elif action == "again":
        for key in keys:
            spool.again(key)


def after(expected: list[str], action: str, keys: list[str]) -> list[str]:
    if action == "add":
        return expected + keys
    return [one for one in expected if one not in keys] if action == "acknowledge" else expected
