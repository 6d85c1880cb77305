"""Owns the way from the pool to one instance's actor: calls of Ray, and which of its errors mean that it is gone."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import ray
from ray import exceptions

from sgl_batch.control_plane.instances.http_calls import PART_WITHIN_S
from sgl_batch.control_plane.instances.http_messages import (
    Control,
    Controlled,
    HttpCall,
    HttpMore,
    HttpPart,
    HttpRequest,
)
from sgl_batch.control_plane.instances.member import MemberLostError
from sgl_batch.control_plane.instances.messages import Lot, Poll, Reading, Report, decode, encode
from sgl_batch.control_plane.instances.ray_actor import Keys, Presence, TakeBack, Taken
from sgl_batch.control_plane.instances.service_state import ServiceState

logger = logging.getLogger(__name__)

_PATIENCE_S = 30.0
_AGAIN_AFTER_S = 1.0
_GONE = (
    exceptions.RayActorError,
    exceptions.NodeDiedError,
    exceptions.LocalRayletDiedError,
    exceptions.WorkerCrashedError,
    exceptions.OutOfMemoryError,
    exceptions.ActorPlacementGroupRemoved,
    exceptions.ActorUnschedulableError,
)


def node_is_alive(node_id: str) -> bool:
    """Return whether Ray does not report a node as dead. Blocks."""
    return all(node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id)


class RayMember:
    """A `Member` over the handle of its actor.

    A call that gets no answer for long is waited for as long as its node is not reported dead: a slow actor is not
    lost. A call that Ray could not deliver is repeated; the actor does nothing twice.

    Args:
        name, incarnation, node: As `Member`.
        node_id: Ray's id of its node.
        handle: The actor's.
        patience_s: A call without an answer for so long has its node looked up.
        is_alive: Looks a node up by its id; it may block.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        node: str,
        node_id: str,
        handle: Any,
        *,
        patience_s: float = _PATIENCE_S,
        is_alive: Callable[[str], bool] = node_is_alive,
    ) -> None:
        self.name, self.incarnation, self.node = name, incarnation, node
        self.node_id, self._handle = node_id, handle
        self._patience_s, self._is_alive = patience_s, is_alive

    async def submit(self, lot: Lot) -> bool:
        """Give it lines."""
        return decode(await self._call("submit", encode(lot)), Taken).is_taken

    async def poll(self, poll: Poll) -> Report:
        """Return what is new."""
        return decode(await self._call("poll", encode(poll), poll.wait_s), Report)

    async def take_back(self, count: int, among: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Take back lines."""
        asked = TakeBack(secrets.token_hex(8), count, among)
        return decode(await self._call("take_back", encode(asked)), Keys).keys

    async def cancel(self, keys: tuple[str, ...]) -> None:
        """Abort lines."""
        await self._call("cancel", encode(Keys(keys)))

    async def known(self) -> tuple[str, ...]:
        """Return the keys of the lines that its engine computes."""
        return decode(await self._call("known", b""), Keys).keys

    async def stats(self) -> Reading:
        """Read the statistics of its engine."""
        return decode(await self._call("stats", b""), Reading)

    async def adopt(self, state: ServiceState) -> None:
        """Give its engines the state of the service."""
        await self._call("adopt", encode(state))

    async def control(self, control: Control) -> Controlled:
        """Send its engine a request that controls it."""
        return decode(await self._call("control", encode(control)), Controlled)

    async def http(self, request: HttpRequest) -> HttpPart:
        """Send its engine another request."""
        return decode(await self._call("http", encode(request), PART_WITHIN_S), HttpPart)

    async def http_more(self, asked: HttpMore) -> HttpPart:
        """Return another part of an answer."""
        return decode(await self._call("http_more", encode(asked), PART_WITHIN_S), HttpPart)

    async def http_end(self, call: str) -> None:
        """Abort a request."""
        await self._call("http_end", encode(HttpCall(call)))

    async def stop(self) -> None:
        """End it. It may be gone already."""
        with suppress(MemberLostError):
            await self._call("stop", b"")

    async def ping(self) -> Presence:
        """Return who it is, once its process runs; its engine starts by then."""
        return decode(await self._call("ping", b""), Presence)

    async def _call(self, method: str, data: bytes, longer_s: float = 0.0) -> bytes:
        while True:
            try:
                reply: bytes = await self._reply(getattr(self._handle, method).remote(data), longer_s)
            except exceptions.ActorUnavailableError as error:
                logger.warning(
                    "instance %s on %s cannot be reached; it is tried again: %s", self.name, self.node, error
                )
                await self._check_node()
                await asyncio.sleep(_AGAIN_AFTER_S)
            except _GONE as error:
                raise MemberLostError(f"its process on {self.node} is gone: {in_words(error)}") from error
            else:
                return reply

    async def _reply(self, reference: Awaitable[bytes], longer_s: float) -> bytes:
        waiting = asyncio.ensure_future(_result(reference))
        try:
            while True:
                done, _ = await asyncio.wait({waiting}, timeout=longer_s + self._patience_s)
                if done:
                    return waiting.result()
                await self._check_node()
        finally:
            waiting.cancel()

    async def _check_node(self) -> None:
        """Raise MemberLostError where the node is dead. Ray may not know: then it counts as alive."""
        alive = True
        with suppress(exceptions.RayError):
            alive = await asyncio.to_thread(self._is_alive, self.node_id)
        if not alive:
            raise MemberLostError(f"its node {self.node} is dead")


async def _result(reference: Awaitable[bytes]) -> bytes:
    return await reference


def in_words(error: BaseException) -> str:
    """Return the reason in an error of Ray's in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    if getattr(error, "actor_init_failed", False):
        return lines[-1]
    if len(lines) > 1 and isinstance(error, exceptions.ActorDiedError):
        lines = lines[1:]  # the first one only says that it died
    return " ".join(lines) or type(error).__name__
