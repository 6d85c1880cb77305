"""Which failures of a call mean that an instance is gone, and which that it is only slow or not reached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray import exceptions

from sgl_batch.control_plane.instances import ray_member as member_module
from sgl_batch.control_plane.instances.member import MemberLostError
from sgl_batch.control_plane.instances.messages import decode, encode
from sgl_batch.control_plane.instances.ray_actor import Keys, TakeBack
from sgl_batch.control_plane.instances.ray_member import RayMember, in_words

UNAVAILABLE = exceptions.ActorUnavailableError("no connection", None)


class FakeHandle:
    """An actor's handle whose calls have these outcomes, one after the other: bytes, errors or awaitables."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.calls: list[tuple[str, bytes]] = []

    def __getattr__(self, method: str) -> Any:
        handle = self

        class Method:
            def remote(self, data: bytes) -> Awaitable[bytes]:
                handle.calls.append((method, data))
                return self.answer(handle.outcomes.pop(0))

            async def answer(self, outcome: Any) -> bytes:
                if isinstance(outcome, Exception):
                    raise outcome
                return outcome if isinstance(outcome, bytes) else await outcome

        return Method()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat calls at once."""
    monkeypatch.setattr(member_module, "_AGAIN_AFTER_S", 0.0)


def member(handle: FakeHandle, is_alive: Callable[[str], bool] = lambda node_id: True) -> RayMember:
    return RayMember("i0", 1, "node7", "id7", handle, patience_s=0.02, is_alive=is_alive)


def test_a_call_that_was_not_delivered_is_repeated_as_it_was() -> None:
    handle = FakeHandle(UNAVAILABLE, UNAVAILABLE, encode(Keys(("a",))))
    assert asyncio.run(member(handle).take_back(3)) == ("a",)
    assert len(handle.calls) == 3
    assert len(set(handle.calls)) == 1, "the actor sees that it is one call"
    assert decode(handle.calls[0][1], TakeBack).count == 3


def test_two_calls_are_two_to_the_actor() -> None:
    handle = FakeHandle(encode(Keys(())), encode(Keys(())))

    async def twice() -> None:
        one = member(handle)
        await one.take_back(1)
        await one.take_back(1)

    asyncio.run(twice())
    assert handle.calls[0] != handle.calls[1]


def test_a_dead_actor_is_lost_and_the_reason_is_told() -> None:
    with pytest.raises(MemberLostError, match="its process on node7 is gone: The actor died unexpectedly"):
        asyncio.run(member(FakeHandle(exceptions.ActorDiedError())).known())


def test_to_stop_what_is_gone_already_is_no_error() -> None:
    asyncio.run(member(FakeHandle(exceptions.ActorDiedError())).stop())


def test_a_slow_actor_is_waited_for_while_its_node_lives_and_is_lost_with_its_node() -> None:
    lives = [True, True, False]
    asked: list[str] = []

    def is_alive(node_id: str) -> bool:
        asked.append(node_id)
        return lives.pop(0)

    with pytest.raises(MemberLostError, match="its node node7 is dead"):
        asyncio.run(member(FakeHandle(asyncio.sleep(60)), is_alive).known())
    assert asked == ["id7"] * 3


def test_a_node_that_ray_cannot_look_up_counts_as_alive() -> None:
    def is_alive(node_id: str) -> bool:
        raise exceptions.RaySystemError("no control store")

    async def slow() -> bytes:
        await asyncio.sleep(0.05)
        return encode(Keys(("a",)))

    assert asyncio.run(member(FakeHandle(slow()), is_alive).known()) == ("a",)


def test_the_error_of_a_constructor_is_its_last_line() -> None:
    text = "The actor died because of an error raised in its creation task, ray::X\n  File y\nConfigError: no cores"
    error = exceptions.RayActorError(error_msg=text, actor_init_failed=True)
    assert in_words(error) == "ConfigError: no cores"
