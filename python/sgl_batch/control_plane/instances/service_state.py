"""Decides what of the requests that control engines must be repeated, and what an engine lacks. Pure."""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from sgl_batch.errors import SglBatchError

PAUSE: Final = "/pause_generation"
CONTINUE: Final = "/continue_generation"
FROM_DISK: Final = "/update_weights_from_disk"
FROM_TENSOR: Final = "/update_weights_from_tensor"
VERSION: Final = "/update_weight_version"
CHANGES = frozenset({PAUSE, CONTINUE, FROM_DISK, FROM_TENSOR, VERSION})
"""The paths of requests that change the state of the service."""


class NotRepeatableError(SglBatchError):
    """An engine cannot be given the weights that the others have. The message says why, and what helps."""


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of engines.

    Attributes:
        number: Of the request that made them; 0: those with which engines start.
        from_disk: The body of the request that loaded them, or from which they were made; None: there was none.
        version: The name that they were given after that.
        lost: What was made of these by a request whose tensors are not kept; "" if nothing.
    """

    number: int = 0
    from_disk: bytes | None = None
    version: str | None = None
    lost: str = ""


class ServiceState(msgspec.Struct, frozen=True, kw_only=True):
    """What all engines of the service have in common. `paused`: the body of the pause that is in force."""

    paused: bytes | None = None
    weights: Weights = Weights()


def changed(state: ServiceState, path: str, body: bytes | None) -> ServiceState:
    """Return the state after a request of `CHANGES` that has succeeded."""
    weights = state.weights
    number = weights.number + 1
    fields = fields_of(body)
    if path == PAUSE:
        return replace(state, paused=body or b"{}")
    if path == CONTINUE:
        return replace(state, paused=None)
    if path == FROM_DISK:
        return replace(state, weights=Weights(number=number, from_disk=body or b"{}"))
    if path == VERSION:
        return replace(state, weights=replace(weights, number=number, version=str(fields.get("new_version"))))
    assert path == FROM_TENSOR, path
    version = fields.get("weight_version")
    lost = "an update from tensors" + (f" (weight_version {version})" if version is not None else "")
    return replace(state, weights=replace(weights, number=number, version=None, lost=lost))


def gained(has: ServiceState, path: str, before: ServiceState, after: ServiceState) -> ServiceState:
    """Return the state of one engine after a request that changed the service's from `before` to `after`.

    An engine with other weights than the service had before is still one with other weights, except after all weights
    were loaded.
    """
    if path in (PAUSE, CONTINUE):
        return replace(has, paused=after.paused)
    if path == FROM_DISK or has.weights == before.weights:
        return replace(has, weights=after.weights)
    return has


def missing(has: ServiceState, wanted: ServiceState) -> list[tuple[str, bytes]]:
    """Return the requests, path and body, that bring an engine from one state to another.

    Raises:
        NotRepeatableError: The weights cannot be had again.
    """
    requests: list[tuple[str, bytes]] = []
    if has.weights != wanted.weights:
        if wanted.weights.lost:
            raise NotRepeatableError(
                f"the other instances have had {wanted.weights.lost}, which is not kept and cannot be repeated here: "
                f"load weights for all with {FROM_DISK}, and send tensors after that"
            )
        if wanted.weights.from_disk is not None:
            requests.append((FROM_DISK, wanted.weights.from_disk))
        elif has.weights.from_disk is not None or has.weights.lost:
            raise NotRepeatableError(
                "it has other weights than those with which the engines start, which the others have: "
                f"load weights for all with {FROM_DISK}"
            )
        if wanted.weights.version is not None:
            body = {"new_version": wanted.weights.version, "abort_all_requests": False}
            requests.append((VERSION, json.dumps(body).encode()))
    if has.paused != wanted.paused:
        requests.append((CONTINUE, b"{}") if wanted.paused is None else (PAUSE, wanted.paused))
    return requests


def fields_of(body: bytes | None) -> dict[str, Any]:
    """Return the fields of a JSON body; none where it is not an object."""
    try:
        found = json.loads(body or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
