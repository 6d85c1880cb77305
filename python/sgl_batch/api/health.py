"""Owns /health: whether the engine answers, starts, hangs or is given up, and whether jobs can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from sgl_batch.api.supervisor import EngineState
from sgl_batch.jobs.batch_service.objects import ServiceSnapshot


def health_of(engine: EngineState, service: ServiceSnapshot) -> tuple[int, dict[str, Any]]:
    """Return the status and body of /health: 200 while the engine answers, even if no job can be written.

    After a fault in the batch service it is 503: only a restart of this server helps.
    """
    ready = engine.phase == "ready" and service.fault is None
    status = "ok" if ready else engine.phase
    if service.fault is not None:
        status = "faulty"
    elif ready and not service.storage.ok:
        status = "degraded"
    return 200 if ready else 503, {
        "status": status,
        "fault": service.fault,
        "engine": {
            "state": engine.phase,
            "message": engine.message,
            "since": int(engine.since),
            "restarts": engine.restarts,
            "forward": engine.forward,
        },
        "storage": service.storage.to_json(),
    }


def health_router(engine: Callable[[], EngineState], service: Callable[[], ServiceSnapshot]) -> APIRouter:
    """Return the route of /health."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        status_code, body = health_of(engine(), service())
        return JSONResponse(body, status_code)

    return router
