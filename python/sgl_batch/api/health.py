"""How the server is: whether the engine answers, starts, hangs or is given up, and whether jobs can be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from sgl_batch.api.supervisor import EngineState
from sgl_batch.jobs.batch_service.objects import StorageState


def health_of(engine: EngineState, storage: StorageState) -> tuple[int, dict[str, Any]]:
    """The status and body of /health: 200 as long as the engine answers, also while no job can be written."""
    ready = engine.phase == "ready"
    status = "degraded" if ready and not storage.ok else ("ok" if ready else engine.phase)
    return 200 if ready else 503, {
        "status": status,
        "engine": {
            "state": engine.phase,
            "message": engine.message,
            "since": int(engine.since),
            "restarts": engine.restarts,
        },
        "storage": storage.to_json(),
    }


def health_router(engine: Callable[[], EngineState], storage: Callable[[], StorageState]) -> APIRouter:
    """The route of /health."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        status_code, body = health_of(engine(), storage())
        return JSONResponse(body, status_code)

    return router
