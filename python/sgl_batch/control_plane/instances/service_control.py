"""Controls all instances at once: sends requests to them, and keeps the state that they have in common."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from starlette.responses import JSONResponse, Response

from sgl_batch.api.engine_endpoints import Asked
from sgl_batch.api.errors import error_response
from sgl_batch.control_plane.instances.control_routes import merged, refusal
from sgl_batch.control_plane.instances.http_messages import Control, Controlled, HttpRequest
from sgl_batch.control_plane.instances.instance_endpoints import whole
from sgl_batch.control_plane.instances.member import Member, MemberLostError
from sgl_batch.control_plane.instances.service_state import CHANGES, CONTINUE, PAUSE, ServiceState, changed
from sgl_batch.errors import RequestError

logger = logging.getLogger(__name__)

_LOST, _LATE = 503, 504
# An instance that hangs must not keep others from being paused. It does what was asked once it goes on.
_WITHIN_S = {PAUSE: 60.0, CONTINUE: 60.0}
_ADOPTED_WITHIN_S = 60.0


class ServiceControl:
    """The control of the instances of one service: an `api.engine_keeper.EnginesControl`.

    Requests that change the state of the service come one after another. The state is kept before engines are changed.
    All methods are called on one event loop.

    Args:
        members: Returns all instances.
        on_weights: Called before engines get other weights, and afterwards.
        state: With which to begin.
        keep: Writes a state down. Raises OSError.
    """

    def __init__(
        self,
        members: Callable[[], Sequence[Member]],
        on_weights: Callable[[], None],
        *,
        state: ServiceState,
        keep: Callable[[ServiceState], None],
    ) -> None:
        self._members, self._on_weights = members, on_weights
        self._state, self._keep = state, keep
        self._prepared: set[Member] = set()
        self._one_change_at_a_time = asyncio.Lock()

    async def prepare(self, member: Member) -> None:
        """Give an instance that joins the state of the service. Raises MemberLostError."""
        adopted = None
        while adopted is not self._state:
            adopted = self._state
            await member.adopt(adopted)
        self._prepared = {*self._prepared.intersection(self._members()), member}

    async def control(self, path: str, asked: Asked) -> Response:
        """Send a request to all instances, and return one answer for all. Raises RequestError for its body."""
        request = await whole(asked)
        why = refusal(path, request.body)
        if why is not None:
            return error_response(501, why, code="many_instances")
        if path not in CHANGES:
            return self._answer(path, await self._ask(path, Control(request=request)))
        async with self._one_change_at_a_time:
            return self._answer(path, await self._change(path, request))

    async def _change(self, path: str, request: HttpRequest) -> dict[str, Controlled]:
        before = self._state
        after = changed(before, path, request.body)
        self._set(after)
        answers = await self._ask(path, Control(request=request, before=before, after=after))
        if after.weights != before.weights:
            self._on_weights()
        if not any(one.status == 200 for one in answers.values()):
            self._set(before)
            await asyncio.gather(*(_adopt(one, before) for one in self._reached()))
        return answers

    def _set(self, state: ServiceState) -> None:
        try:
            self._keep(state)
        except OSError as error:
            message = f"nothing is changed, because the state of the instances cannot be written: {error}"
            raise RequestError(code="state_not_written", message=message, status_code=507) from error
        if state.weights != self._state.weights:
            self._on_weights()
        self._state = state

    async def _ask(self, path: str, control: Control) -> dict[str, Controlled]:
        members = self._reached()
        answers = await asyncio.gather(*(_control(one, control, _WITHIN_S.get(path)) for one in members))
        return {member.name: answer for member, answer in zip(members, answers, strict=True)}

    def _reached(self) -> list[Member]:
        """Return the instances that have the state of the service, or are to have it. Others get it as they join."""
        return [one for one in self._members() if one in self._prepared]

    def _answer(self, path: str, answers: dict[str, Controlled]) -> Response:
        if not any(one.status for one in answers.values()):
            message = f"no instance is ready, and {path} has changed nothing"
            return error_response(503, message, code="engine_unavailable", headers={"Retry-After": "5"})
        status, body = merged(path, answers)
        if status != 200:
            logger.error("%s", body["message"])
        return JSONResponse(body, status)


async def _control(member: Member, control: Control, within_s: float | None) -> Controlled:
    try:
        return await asyncio.wait_for(member.control(control), within_s)
    except TimeoutError:
        return Controlled(status=_LATE, body=f"it has not answered within {within_s} s, and may do it later".encode())
    except MemberLostError as error:
        return Controlled(status=_LOST, body=f"it is gone: {error}".encode())


async def _adopt(member: Member, state: ServiceState) -> None:
    try:
        await asyncio.wait_for(member.adopt(state), _ADOPTED_WITHIN_S)
    except (MemberLostError, TimeoutError) as error:
        logger.warning("instance %s does not know yet that nothing has changed: %s", member.name, error)
