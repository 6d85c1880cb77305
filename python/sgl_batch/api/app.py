"""Assembles the server's HTTP app: our routes, the engine's routes behind them, keys, and the shape of errors."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from sgl_batch.api.auth import AccessMiddleware, AccessRules
from sgl_batch.api.batches import batches_router
from sgl_batch.api.engine_keeper import EngineKeeper
from sgl_batch.api.errors import add_error_handlers, error_response
from sgl_batch.api.files import files_router
from sgl_batch.api.health import health_router
from sgl_batch.api.instances import instances_router
from sgl_batch.api.metrics import metrics_router
from sgl_batch.api.openapi import openapi_router
from sgl_batch.api.pass_through import PassThrough
from sgl_batch.api.progress_page import progress_router
from sgl_batch.jobs.batch_service.service import BatchService

_OURS = ("/v1/files/", "/v1/batches/", "/v1/sgl_batch/")


def make_app(service: BatchService, keeper: EngineKeeper, engine: PassThrough, rules: AccessRules) -> FastAPI:
    """Return the server's ASGI app."""
    # openapi.py makes the document: with the engine's operations, and without FastAPI's own shape of errors.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.include_router(files_router(service))
    app.include_router(batches_router(service))
    app.include_router(health_router(lambda: keeper.state, service.snapshot))
    app.include_router(metrics_router(service.snapshot, keeper, engine))
    app.include_router(progress_router(service, keeper))
    app.include_router(instances_router(lambda: keeper.instances))
    app.include_router(openapi_router(app, engine))
    app.router.default = _Rest(engine)
    add_error_handlers(app)
    app.add_middleware(AccessMiddleware, rules=rules)
    return app


class _Rest:
    """Takes what none of our routes takes: 404 for paths below our own, and the engine for all others."""

    def __init__(self, engine: ASGIApp) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_OURS):
            message = f"Not Found: {scope['method']} {scope['path']}"
            await error_response(404, message, code="not_found")(scope, receive, send)
        else:
            await self._engine(scope, receive, send)
