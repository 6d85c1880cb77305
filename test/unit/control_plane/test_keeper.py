"""A lost instance is replaced by the next incarnation, a draining node is emptied, a new node gets instances."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from sgl_batch.control_plane.instances.host import HostEndedError, NotStartedError, PoolCalls
from sgl_batch.control_plane.instances.keeper import InstanceKeeper
from sgl_batch.control_plane.instances.member import Member
from sgl_batch.control_plane.instances.placement import Needs, Node, Place
from sgl_batch.control_plane.instances.records import InstanceRecords, Known
from sgl_batch.errors import ConfigError, RequestError


@dataclass(eq=False)
class FakeMember:
    name: str
    incarnation: int
    node: str


class FakeHost:
    """Nodes and members that a test changes by hand.

    `alive` has what runs, `places` what is taken, until it is ended; `faults` how many starts fail.
    """

    def __init__(self, *nodes: Node) -> None:
        self.table = list(nodes)
        self.alive: dict[tuple[str, int], FakeMember] = {}
        self.faults = 0
        self.has_ended = False
        self.forgotten: list[str] = []
        self.places: dict[tuple[str, int], Place] = {}

    async def nodes(self) -> list[Node]:
        if self.has_ended:
            raise HostEndedError("no Ray")
        return list(self.table)

    async def start(self, name: str, incarnation: int, place: Place) -> Member:
        if self.faults:
            self.faults -= 1
            raise NotStartedError("it does not start")
        if place in self.places.values():
            raise NotStartedError("the place is taken")
        self.alive[name, incarnation] = member = FakeMember(name, incarnation, place.node)
        self.places[name, incarnation] = place
        return cast(Member, member)

    async def find(self, name: str, known: Known) -> Member | None:
        return cast("Member | None", self.alive.get((name, known.incarnation)))

    async def end(self, name: str, incarnation: int) -> None:
        self.alive.pop((name, incarnation), None)
        self.places.pop((name, incarnation), None)

    def kill(self, name: str, incarnation: int) -> None:
        """End a member without its keeper: its place is not free."""
        del self.alive[name, incarnation]

    async def forget(self, name: str, place: Place) -> None:
        self.forgotten.append(name)


class FakePool:
    """Members that have joined; `busy` ones are not empty before the test sets their event."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.from_before: list[str] = []
        self.busy: dict[str, asyncio.Event] = {}
        self.drained: list[str] = []

    def calls(self) -> PoolCalls:
        return PoolCalls(joined=self._joined, left=self._left, draining=self._drain)

    def _joined(self, member: Member, is_from_before: bool) -> None:
        self.members.append(member)
        if is_from_before:
            self.from_before.append(member.name)

    def _left(self, member: Member, reason: str) -> None:
        self.members.remove(member)

    async def _drain(self, member: Member) -> None:
        if member.name in self.busy:
            await self.busy[member.name].wait()
        self.drained.append(member.name)

    def running(self) -> list[tuple[str, int, str]]:
        return sorted((one.name, one.incarnation, one.node) for one in self.members)


def node(name: str, cores: int = 2) -> Node:
    return Node(node_id=name, name=name, cores=tuple(range(cores)))


class Kept:
    """A keeper with its fakes."""

    def __init__(self, directory: Path, host: FakeHost, count: int | None = None, cores: int | None = None) -> None:
        self.host, self.pool = host, FakePool()
        self.keeper = InstanceKeeper(
            host,
            InstanceRecords(directory),
            self.pool.calls(),
            needs=Needs(cores=cores),
            count=count,
            look_every_s=0.001,
            first_delay_s=0.001,
        )

    async def until(self, *running: tuple[str, int, str]) -> None:
        await until(lambda: self.pool.running() == sorted(running))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def run(test: Callable[[], Awaitable[Any]]) -> None:
    async def whole() -> None:
        await test()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(whole())


def test_a_lost_instance_comes_back_as_the_next_incarnation_on_its_node(tmp_path: Path) -> None:
    async def test() -> None:
        kept = Kept(tmp_path, FakeHost(node("a"), node("b")))
        await kept.keeper.start()
        await kept.until(("i1", 1, "a"), ("i2", 1, "b"))
        kept.keeper.lost(kept.pool.members[0], "killed")
        await kept.until(("i1", 2, "a"), ("i2", 1, "b"))
        assert ("i1", 1) not in kept.host.alive

    run(test)


def test_what_is_said_of_an_earlier_incarnation_ends_no_later_one(tmp_path: Path) -> None:
    async def test() -> None:
        kept = Kept(tmp_path, FakeHost(node("a")))
        await kept.keeper.start()
        await kept.until(("i1", 1, "a"))
        earlier = kept.pool.members[0]
        kept.keeper.lost(earlier, "killed")
        await kept.until(("i1", 2, "a"))
        kept.keeper.lost(earlier, "killed")
        await asyncio.sleep(0.01)
        await kept.until(("i1", 2, "a"))

    run(test)


def test_an_instance_without_a_node_waits_and_says_so(tmp_path: Path) -> None:
    async def test() -> None:
        kept = Kept(tmp_path, FakeHost(node("a"), node("b")), count=2)
        await kept.keeper.start()
        await kept.until(("i1", 1, "a"), ("i2", 1, "b"))
        kept.host.table.pop()
        kept.keeper.lost(kept.pool.members[1], "its node is gone")
        await until(lambda: "a (0 of 2 cores free)" in str(kept.keeper.views()[1].message))
        assert kept.keeper.views()[1].phase == "waiting"
        kept.host.table.append(node("c"))
        await kept.until(("i1", 1, "a"), ("i2", 2, "c"))

    run(test)


def test_an_instance_that_does_not_start_is_tried_again(tmp_path: Path) -> None:
    async def test() -> None:
        host = FakeHost(node("a"))
        host.faults = 3
        kept = Kept(tmp_path, host)
        await kept.keeper.start()
        await kept.until(("i1", 4, "a"))

    run(test)


def test_a_draining_node_is_emptied_before_its_instance_moves(tmp_path: Path) -> None:
    async def test() -> None:
        kept = Kept(tmp_path, FakeHost(node("a", 2), node("b", 4)), count=1, cores=2)
        await kept.keeper.start()
        await kept.until(("i1", 1, "b"))
        kept.pool.busy["i1"] = asyncio.Event()
        kept.host.table[1] = replace(kept.host.table[1], draining=True)
        await until(lambda: kept.keeper.views()[0].phase == "draining")
        assert kept.pool.running() == [("i1", 1, "b")]
        kept.pool.busy["i1"].set()
        await kept.until(("i1", 2, "a"))

    run(test)


def test_new_nodes_get_instances_only_if_the_number_is_auto(tmp_path: Path) -> None:
    async def test() -> None:
        auto, fixed = Kept(tmp_path, FakeHost(node("a"))), Kept(tmp_path / "..", FakeHost(node("a")), count=1)
        for kept in (auto, fixed):
            await kept.keeper.start()
            kept.host.table.append(node("b"))
        await auto.until(("i1", 1, "a"), ("i2", 1, "b"))
        await asyncio.sleep(0.01)
        assert len(fixed.pool.members) == 1

    run(test)


def test_a_removed_instance_ends_empty_and_is_not_replaced(tmp_path: Path) -> None:
    async def test() -> None:
        kept = Kept(tmp_path, FakeHost(node("a"), node("b")))
        await kept.keeper.start()
        await kept.until(("i1", 1, "a"), ("i2", 1, "b"))
        await kept.keeper.remove("i1")
        await kept.until(("i2", 1, "b"))
        await until(lambda: [one.name for one in kept.keeper.views()] == ["i2"])
        assert kept.pool.drained == kept.host.forgotten == ["i1"]
        await asyncio.sleep(0.01)
        assert len(kept.keeper.views()) == 1

    run(test)


def test_a_drained_instance_keeps_its_place(tmp_path: Path) -> None:
    async def test() -> None:
        kept = Kept(tmp_path, FakeHost(node("a")))
        await kept.keeper.start()
        await kept.until(("i1", 1, "a"))
        await kept.keeper.drain("i1")
        await until(lambda: kept.keeper.views()[0].phase == "drained")
        assert ("i1", 1) in kept.host.alive
        with pytest.raises(RequestError, match="no node has room"):
            await kept.keeper.add()

    run(test)


def test_one_more_is_added_where_there_is_room(tmp_path: Path) -> None:
    async def test() -> None:
        kept = Kept(tmp_path, FakeHost(node("a", 4)), count=1, cores=2)
        await kept.keeper.start()
        assert (await kept.keeper.add()).cores == (2, 3)
        await kept.until(("i1", 1, "a"), ("i2", 1, "a"))
        with pytest.raises(RequestError, match="no node has room"):
            await kept.keeper.add()

    run(test)


def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        kept = Kept(tmp_path, FakeHost(node("a")))
        await kept.keeper.start()
        with pytest.raises(RequestError, match="there is no instance 'x' \\(there are: i1\\)"):
            await kept.keeper.remove("x")

    run(test)


def test_a_restarted_server_goes_on_with_instances_that_live_and_frees_the_places_of_others(tmp_path: Path) -> None:
    async def test() -> None:
        first = Kept(tmp_path, FakeHost(node("a"), node("b")))
        await first.keeper.start()
        await first.until(("i1", 1, "a"), ("i2", 1, "b"))
        await first.keeper.stop(end=False)
        first.host.kill("i2", 1)
        second = Kept(tmp_path, first.host)
        await second.keeper.start()
        await second.until(("i1", 1, "a"), ("i2", 2, "b"))
        assert second.pool.from_before == ["i1"]

    run(test)


def test_after_a_restart_of_all_nodes_names_go_on_and_incarnations_grow(tmp_path: Path) -> None:
    async def test() -> None:
        first = Kept(tmp_path, FakeHost(node("a"), node("b")))
        await first.keeper.start()
        await first.until(("i1", 1, "a"), ("i2", 1, "b"))
        await first.keeper.stop(end=True)
        assert not first.host.alive
        again = FakeHost(Node(node_id="x", name="b", cores=(0,)), Node(node_id="y", name="a", cores=(0,)))
        second = Kept(tmp_path, again)
        await second.keeper.start()
        await second.until(("i1", 2, "a"), ("i2", 2, "b"))

    run(test)


def test_the_end_of_what_starts_instances_is_an_error_of_the_keeper(tmp_path: Path) -> None:
    async def test() -> None:
        kept = Kept(tmp_path, FakeHost(node("a")))
        await kept.keeper.start()
        kept.keeper.check()
        kept.host.has_ended = True
        with pytest.raises(HostEndedError, match="no Ray"):
            await until(lambda: kept.keeper.check() is not None)

    run(test)


def test_a_smaller_number_removes_the_last_ones(tmp_path: Path) -> None:
    async def test() -> None:
        first = Kept(tmp_path, FakeHost(node("a", 4)), count=2)
        await first.keeper.start()
        await first.until(("i1", 1, "a"), ("i2", 1, "a"))
        await first.keeper.stop(end=False)
        second = Kept(tmp_path, first.host, count=1)
        await second.keeper.start()
        await until(lambda: second.pool.drained == ["i2"])
        await second.until(("i1", 1, "a"))

    run(test)


def test_a_file_of_instances_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "instances.json").write_text("{")
    with pytest.raises(ConfigError, match=r"instances\.json, which says what instances there are, cannot be read"):
        InstanceRecords(tmp_path)
