"""Starts, finds and ends the members of a service as actors of Ray. It does not decide which, or where."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_batch.control_plane.instances.cluster import Cluster
from sgl_batch.control_plane.instances.host import HostError, NotStartedError
from sgl_batch.control_plane.instances.member import MemberLostError
from sgl_batch.control_plane.instances.messages import encode
from sgl_batch.control_plane.instances.placement import Node, Place
from sgl_batch.control_plane.instances.ray_actor import MAX_CONCURRENCY, InstanceActor, InstanceSettings
from sgl_batch.control_plane.instances.records import Known

if TYPE_CHECKING:
    from sgl_batch.control_plane.instances.ray_member import RayMember

logger = logging.getLogger(__name__)

_PLACED_WITHIN_S = 30.0
_BEGUN_WITHIN_S = 120.0
_STOPPED_WITHIN_S = 30.0
_AGAIN_AFTER_S = _LOOK_EVERY_S = 1.0
_NODE_LABEL = "ray.io/node-id"


class RayHost:
    """The members of one service on a cluster.

    An incarnation is a named actor in a placement group of its own, which holds its cores and GPUs on its node. They
    outlive this process where `is_detached`.

    Args:
        cluster: In whose namespace the names lie.
        service: The identity of the service: part of the directories on the nodes, which its instances come back to.
        engine_argv: The engine's flags.
        model: The model's directory, which each node needs; None where it is a name on the hub.
        stall_s, restart_stalled: As for a server's engine.
        is_detached: Whether members go on without this process.
    """

    def __init__(
        self,
        cluster: Cluster,
        service: str,
        engine_argv: Sequence[str],
        *,
        model: str | None,
        stall_s: float = 0.0,
        restart_stalled: bool = False,
        is_detached: bool,
    ) -> None:
        self._cluster, self._service, self._engine_argv = cluster, service, tuple(engine_argv)
        self._model = model
        self._stall_s, self._restart_stalled = stall_s, restart_stalled
        self._lifetime = "detached" if is_detached else None
        self._members: dict[tuple[str, int], RayMember] = {}
        self._said: set[str] = set()

    async def nodes(self) -> list[Node]:
        """Return the living nodes that can run an instance. Why others cannot is logged once."""
        with _ray_errors():
            nodes, faults = await asyncio.to_thread(self._cluster.usable, self._model)
        for fault in set(faults.values()) - self._said:
            logger.error("%s", fault)
        self._said = set(faults.values())
        return nodes

    async def start(self, name: str, incarnation: int, place: Place) -> RayMember:
        """Start an incarnation on its place. Raises NotStartedError: others hold the place, or its process ends."""
        settings = InstanceSettings(
            engine_argv=self._engine_argv,
            directory=self._directory(name),
            incarnation=incarnation,
            cores=place.cores,
            stall_s=self._stall_s,
            restart_stalled=self._restart_stalled,
        )
        try:
            with _ray_errors():
                handle = await asyncio.to_thread(self._create, _full_name(name, incarnation), settings, place)
        except HostError as error:
            await self.end(name, incarnation)
            raise NotStartedError(str(error)) from error
        member = _member(name, incarnation, place, handle)
        try:
            await asyncio.wait_for(member.ping(), _BEGUN_WITHIN_S)
        except (MemberLostError, TimeoutError) as error:
            await self.end(name, incarnation)
            why = f"its process on {place.node} has not answered within {_BEGUN_WITHIN_S:g} s"
            raise NotStartedError(str(error) or why) from error
        self._members[name, incarnation] = member
        return member

    async def find(self, name: str, known: Known) -> RayMember | None:
        """Return an incarnation that still runs."""
        with _ray_errors():
            handle = await asyncio.to_thread(self._existing, _full_name(name, known.incarnation))
        if handle is None or known.place is None:
            return None
        member = _member(name, known.incarnation, known.place, handle)
        try:
            await asyncio.wait_for(member.ping(), _BEGUN_WITHIN_S)
        except (MemberLostError, TimeoutError):
            return None
        self._members[name, known.incarnation] = member
        return member

    async def end(self, name: str, incarnation: int) -> None:
        """End an incarnation, first by asking it."""
        member = self._members.pop((name, incarnation), None)
        if member is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(member.stop(), _STOPPED_WITHIN_S)
        while True:  # what holds a place for ever would keep others from it
            try:
                with _ray_errors():
                    return await asyncio.to_thread(self._remove, _full_name(name, incarnation))
            except HostError as error:
                logger.warning("instance %s: its place is not freed yet: %s", name, error)
                await asyncio.sleep(_AGAIN_AFTER_S)

    async def forget(self, name: str, place: Place) -> None:
        """Remove the directory of an instance that has ended."""
        await asyncio.to_thread(self._cluster.remove_directory, place.node_id, self._directory(name))

    def _directory(self, name: str) -> str:
        return str(Path(tempfile.gettempdir()) / f"sgl_batch_{self._service}" / name)

    # What blocks.

    def _create(self, full_name: str, settings: InstanceSettings, place: Place) -> Any:
        import ray
        from ray.util import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from sgl_batch.control_plane.instances.ray_member import node_is_alive

        resources = {"CPU": float(len(place.cores)), **({"GPU": float(place.gpus)} if place.gpus else {})}
        group = placement_group(
            [resources],
            name=f"{self._cluster.namespace}/{full_name}",
            lifetime=self._lifetime,
            bundle_label_selector=[{_NODE_LABEL: place.node_id}],
        )
        until = time.monotonic() + _PLACED_WITHIN_S
        while not group.wait(_LOOK_EVERY_S):
            if not node_is_alive(place.node_id):
                why = f"its node {place.node} is dead"
            elif time.monotonic() > until:
                why = (
                    f"{place.node} has not given it {len(place.cores)} cores and {place.gpus} GPUs within "
                    f"{_PLACED_WITHIN_S:g} s: others use them"
                )
            else:
                continue
            self._remove(full_name)
            raise NotStartedError(why)
        actor = ray.remote(InstanceActor).options(
            name=full_name,
            namespace=self._cluster.namespace,
            lifetime=self._lifetime,
            max_restarts=0,
            max_concurrency=MAX_CONCURRENCY,
            num_cpus=resources["CPU"],
            num_gpus=place.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        )
        return actor.remote(encode(settings))

    def _existing(self, full_name: str) -> Any:
        import ray

        try:
            return ray.get_actor(full_name, namespace=self._cluster.namespace)
        except ValueError:
            return None

    def _remove(self, full_name: str) -> None:
        import ray
        from ray.util import get_placement_group, remove_placement_group

        handle = self._existing(full_name)
        if handle is not None:
            ray.kill(handle)
        with suppress(ValueError):  # there is none
            remove_placement_group(get_placement_group(f"{self._cluster.namespace}/{full_name}"))


@contextmanager
def _ray_errors() -> Iterator[None]:
    """Turn errors of Ray into HostError."""
    import ray

    try:
        yield
    except ray.exceptions.RayError as error:
        raise HostError(f"Ray has failed: {str(error).strip() or type(error).__name__}") from error


def _member(name: str, incarnation: int, place: Place, handle: Any) -> RayMember:
    # Imported late: it imports Ray, which reads its environment then.
    from sgl_batch.control_plane.instances.ray_member import RayMember

    return RayMember(name, incarnation, place.node, place.node_id, handle)


def _full_name(name: str, incarnation: int) -> str:
    return f"{name}.{incarnation}"
