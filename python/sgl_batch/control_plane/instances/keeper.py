"""Keeps the instances running: puts each on a node, replaces what is lost, empties what is to leave.

It knows no lines and no Ray: `host` starts and ends members, the pool is told which there are, and says which are gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from sgl_batch.control_plane.instances.host import Host, HostEndedError, NotStartedError, PoolCalls
from sgl_batch.control_plane.instances.instance import Instance, InstanceView, Wish
from sgl_batch.control_plane.instances.member import Member
from sgl_batch.control_plane.instances.placement import (
    Needs,
    Node,
    Place,
    choose_place,
    most_instances,
    no_room,
    place_first,
)
from sgl_batch.control_plane.instances.records import InstanceRecords, Known
from sgl_batch.errors import RequestError, SglBatchError

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 1.0, 60.0
# After an incarnation that lived for so long, earlier deaths do not count.
_STABLE_AFTER_S = 60.0


class InstanceKeeper:
    """Keeps `count` instances running, or as many as the nodes are for (None).

    All methods are called on one event loop.
    """

    def __init__(
        self,
        host: Host,
        records: InstanceRecords,
        pool: PoolCalls,
        *,
        needs: Needs,
        count: int | None,
        look_every_s: float = _LOOK_EVERY_S,
        first_delay_s: float = _FIRST_DELAY_S,
    ) -> None:
        self._host, self._records, self._pool = host, records, pool
        self._needs, self._count = needs, count
        self._look_every_s, self._first_delay_s = look_every_s, first_delay_s
        self._instances: dict[str, Instance] = {}
        self._nodes: list[Node] = []
        self._fewer = 0  # so many fewer than the nodes are for, because they were removed
        self._watching: asyncio.Task[None] | None = None

    # For whoever starts the instances.

    async def start(self) -> None:
        """Go on with the instances of an earlier server, and start the others.

        Raises ConfigError where they do not fit. Nothing runs then.
        """
        self._nodes = await self._host.nodes()
        known = self._records.known()
        ran = {name: one for name, one in known.items() if one.incarnation}
        found = dict(zip(ran, await asyncio.gather(*(self._find(name, one) for name, one in ran.items())), strict=True))
        if not any(found.values()):
            self._begin_anew(known)
        else:
            for name, one in known.items():
                self._begin(name, one.place, found.get(name))
            self._fit_count()
        self._watching = asyncio.create_task(self._watch())

    async def stop(self, *, end: bool, forget: bool = False) -> None:
        """Stop keeping them.

        Args:
            end: End them too. Else they go on, and a later server finds them.
            forget: Also remove what they leave on their nodes, which a later server would read.
        """
        tasks = [one.life for one in self._instances.values() if one.life] + (
            [self._watching] if self._watching else []
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if end:
            numbers = {name: one.incarnation for name, one in self._records.known().items()}
            members = [self._end(one, numbers[name]) for name, one in self._instances.items() if name in numbers]
            await asyncio.gather(*members)
        if forget:
            places = [(one.name, one.place) for one in self._instances.values()]
            await asyncio.gather(*(self._host.forget(name, place) for name, place in places if place is not None))

    async def _find(self, name: str, known: Known) -> Member | None:
        """Return an incarnation that runs still. Of one that does not, the place is freed: it outlives a server."""
        member = await self._host.find(name, known)
        if member is None:
            await self._host.end(name, known.incarnation)
        return member

    def check(self) -> None:
        """Raise what keeps it from keeping instances for good: HostEndedError, or a fault of the program."""
        if self._watching is not None and self._watching.done():
            self._watching.result()

    # For the pool.

    def lost(self, member: Member, reason: str) -> None:
        """Replace a member that was found gone."""
        one = self._instances.get(member.name)
        if one is not None and one.member is member:
            one.lost = reason
            one.news.set()

    # For people.

    def views(self) -> list[InstanceView]:
        """Return the instances, by name."""
        known = self._records.known()
        return [self._view(one, known.get(one.name, Known()).incarnation) for one in self._instances.values()]

    async def add(self) -> InstanceView:
        """Start one more instance. Raises RequestError (409, no_room) where no node has room for it."""
        place = choose_place(self._nodes, self._taken(), self._needs)
        if place is None:
            message = no_room(self._nodes, self._taken(), self._needs)
            raise RequestError(code="no_room", message=message, status_code=409)
        if self._count is not None:
            self._count += 1
        else:
            self._fewer -= 1
        return self._view(self._begin(self._records.new_name(), place, None), 0)

    async def drain(self, name: str) -> InstanceView:
        """Let an instance answer what it has, and give it no more lines. Raises RequestError (404)."""
        return self._asked(name, Wish.STAY)

    async def remove(self, name: str) -> InstanceView:
        """Let an instance answer what it has, and end it for good. Raises RequestError (404)."""
        is_new = self._instances.get(name, Instance(name="")).wish is not Wish.REMOVE
        view = self._asked(name, Wish.REMOVE)
        if is_new and self._count is not None:
            self._count -= 1
        elif is_new:
            self._fewer += 1
        return view

    def _asked(self, name: str, wish: Wish) -> InstanceView:
        one = self._instances.get(name)
        if one is None:
            names = ", ".join(self._instances) or "none"
            raise RequestError(
                code="instance_not_found",
                message=f"there is no instance {name!r} (there are: {names})",
                status_code=404,
            )
        if one.wish is not Wish.REMOVE:
            one.ask(wish)
        return self._view(one, self._records.known()[name].incarnation)

    def _view(self, one: Instance, incarnation: int) -> InstanceView:
        place = one.place
        return InstanceView(
            name=one.name,
            incarnation=incarnation,
            node=place.node if place else "",
            cores=place.cores if place else (),
            gpus=place.gpus if place else 0,
            phase=one.phase,
            message=one.message,
        )

    # How many there are.

    def _begin_anew(self, known: Mapping[str, Known]) -> None:
        """Place all instances. Those with an earlier name find what an earlier incarnation has left on the node."""
        names = dict(known)
        for place in place_first(self._nodes, self._count, self._needs):
            same = [name for name, one in names.items() if one.place is not None and one.place.node == place.node]
            name = next(iter([*same, *names]), None)
            names.pop(name or "", None)
            self._begin(name or self._records.new_name(), place, None)
        for name in names:
            self._records.forget(name)

    def _fit_count(self) -> None:
        """Make or remove instances until there are as many as there are to be."""
        staying = [one for one in self._instances.values() if one.wish is not Wish.REMOVE]
        wanted = self._count
        if wanted is None:
            wanted = max(0, sum(most_instances(node, self._needs) for node in self._nodes) - self._fewer)
        for _ in range(wanted - len(staying)):
            place = choose_place(self._nodes, self._taken(), self._needs)
            if place is not None or self._count is not None:
                self._begin(self._records.new_name(), place, None)
        if self._count is not None:
            for one in staying[wanted:]:
                one.ask(Wish.REMOVE)

    async def _watch(self) -> None:
        """See nodes come, drain and go."""
        while True:
            await asyncio.sleep(self._look_every_s)
            try:
                self._nodes = await self._host.nodes()
                self._fit_count()
            except HostEndedError:
                raise
            except (SglBatchError, OSError) as error:
                logger.error("the instances cannot be looked after: %s", error)
            leaving = {node.node_id for node in self._nodes if node.draining}
            for one in self._instances.values():
                if one.holds_place and one.place is not None and one.place.node_id in leaving and one.wish is None:
                    logger.warning("node %s is draining: instance %s moves elsewhere", one.place.node, one.name)
                    one.ask(Wish.MOVE)
                elif one.member is None:
                    one.news.set()

    # The life of one instance.

    def _begin(self, name: str, place: Place | None, member: Member | None) -> Instance:
        one = Instance(name=name, place=place, member=member, holds_place=place is not None, from_before=bool(member))
        if member is None and place is not None and place.node_id not in {node.node_id for node in self._nodes}:
            one.holds_place = False
        self._instances[name] = one
        one.life = asyncio.create_task(self._live(one))
        one.life.add_done_callback(_report_fault)
        return one

    async def _live(self, one: Instance) -> None:
        while one.wish is not Wish.REMOVE or one.member is not None:
            began = time.monotonic()
            if one.member is None:
                await self._find_place(one)
                if one.wish is not Wish.REMOVE:
                    await self._start(one)
            if one.member is not None:
                await self._run(one)
            await self._after_end(one, time.monotonic() - began)
        one.holds_place = False
        if one.place is not None:
            await self._host.forget(one.name, one.place)
        self._instances.pop(one.name, None)
        self._records.forget(one.name)
        logger.info("instance %s is removed", one.name)

    async def _find_place(self, one: Instance) -> None:
        """Wait until it has a place, or is to be removed. It says why it waits."""
        while not one.holds_place and one.wish is not Wish.REMOVE:
            place = choose_place(self._nodes, self._taken(), self._needs, before=one.place)
            if place is not None:
                one.place, one.holds_place, one.message = place, True, None
                return
            message = no_room(self._nodes, self._taken(), self._needs)
            if message != one.message:
                logger.warning("instance %s waits: %s", one.name, message)
            one.message = message
            one.news.clear()
            await one.news.wait()

    async def _start(self, one: Instance) -> None:
        assert one.place is not None, "it holds a place"
        try:
            incarnation = self._records.next_incarnation(one.name, one.place)
            one.member = await self._host.start(one.name, incarnation, one.place)
        except (NotStartedError, OSError) as error:
            one.lost = str(error)
            return
        one.message, one.from_before = None, False
        logger.info("instance %s runs on %s, cores %s", one.name, one.place.node, _ranges(one.place.cores))

    async def _run(self, one: Instance) -> None:
        """Let it take lines until it is lost, or empty and to end."""
        member = one.member
        assert member is not None, "it runs"
        self._pool.joined(member, one.from_before)
        draining: asyncio.Task[None] | None = None
        while one.lost is None and not (one.is_empty and one.wish in (Wish.MOVE, Wish.REMOVE)):
            if one.wish is not None and draining is None:
                draining = asyncio.create_task(self._empty(one, member))
            one.news.clear()
            await one.news.wait()
        if draining is not None:
            draining.cancel()
            await asyncio.wait({draining})
        self._pool.left(member, one.lost or "it was emptied")

    async def _empty(self, one: Instance, member: Member) -> None:
        await self._pool.draining(member)
        one.is_empty = True
        one.news.set()

    async def _after_end(self, one: Instance, lived_s: float) -> None:
        """Free its place, and wait before the next incarnation where the last ones lived only for a short time."""
        lost, incarnation = one.lost, self._records.known()[one.name].incarnation
        await self._end(one, incarnation)
        one.holds_place = one.is_empty = False
        one.lost = None
        if one.wish is Wish.MOVE:
            one.wish = None
        if lost is None:
            one.deaths = 0
            return
        one.deaths = 1 if lived_s >= _STABLE_AFTER_S else one.deaths + 1
        delay_s = min(self._first_delay_s * 2 ** (one.deaths - 1), _LONGEST_DELAY_S)
        one.message = f"it is started again: {lost}"
        logger.error("instance %s is lost, and is started again in %g s: %s", one.name, delay_s, lost)
        await asyncio.sleep(delay_s)

    async def _end(self, one: Instance, incarnation: int) -> None:
        one.member = None
        await self._host.end(one.name, incarnation)

    def _taken(self) -> list[Place]:
        return [one.place for one in self._instances.values() if one.holds_place and one.place is not None]


def _ranges(cores: tuple[int, ...]) -> str:
    return f"{cores[0]} to {cores[-1]}" if len(cores) > 1 else ", ".join(map(str, cores))


def _report_fault(life: asyncio.Task[None]) -> None:
    if not life.cancelled() and life.exception() is not None:
        logger.error("an instance is not kept any more, by a fault of the program", exc_info=life.exception())
