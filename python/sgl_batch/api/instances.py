"""Owns the routes of instances under /v1/sgl_batch/instances. They need the administrator's key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter

from sgl_batch.api.engine_keeper import InstanceControl
from sgl_batch.errors import RequestError

INSTANCES_PATH = "/v1/sgl_batch/instances"


def instances_router(control: Callable[[], InstanceControl | None]) -> APIRouter:
    """Return the routes."""
    router = APIRouter()

    def instances() -> InstanceControl:
        found = control()
        if found is None:
            message = "this server has one engine of its own and no instances; start it with --instances N"
            raise RequestError(code="no_instances", message=message, status_code=409)
        return found

    @router.get(INSTANCES_PATH)
    async def show() -> dict[str, Any]:
        return {"object": "list", "data": [one.to_json() for one in instances().rows()], "has_more": False}

    @router.post(INSTANCES_PATH)
    async def add() -> dict[str, Any]:
        return (await instances().add()).to_json()

    @router.post(INSTANCES_PATH + "/{name}/drain")
    async def drain(name: str) -> dict[str, Any]:
        return (await instances().drain(name)).to_json()

    @router.delete(INSTANCES_PATH + "/{name}")
    async def remove(name: str) -> dict[str, Any]:
        return (await instances().remove(name)).to_json()

    return router
