"""Owns the progress page at / and the JSON that it polls. The page itself has no data, so it needs no key."""

from __future__ import annotations

import time
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from sgl_batch.api.engine_keeper import EngineKeeper
from sgl_batch.api.health import health_of
from sgl_batch.jobs.batch_service.service import BatchService

PROGRESS_PATH = "/v1/sgl_batch/progress"
_MOST_JOBS = 100
# The page is one file: it loads nothing from elsewhere, and connects only to its own server.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def progress_router(service: BatchService, keeper: EngineKeeper) -> APIRouter:
    """Return the routes of the page and its data."""
    router = APIRouter()
    page = files("sgl_batch.api").joinpath("progress_page.html").read_bytes()

    @router.get("/")
    async def show() -> Response:
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    @router.get(PROGRESS_PATH)
    async def progress() -> JSONResponse:
        return JSONResponse(await _progress(service, keeper))

    return router


async def _progress(service: BatchService, keeper: EngineKeeper) -> dict[str, Any]:
    snapshot = service.snapshot()
    _, health = health_of(keeper.state, snapshot)
    latest = await service.list_batches(limit=_MOST_JOBS)
    return {
        "now": time.time(),
        "health": health,
        "in_flight": snapshot.in_flight,
        "jobs_by_status": dict(snapshot.jobs_by_status),
        "counters": dict(snapshot.counters),
        "jobs": [job.to_openai() for job in latest.data],
        "engine": keeper.view.to_json(),
        "instances": [one.to_json() for one in keeper.instances.rows()] if keeper.instances is not None else [],
    }
