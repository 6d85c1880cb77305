"""Puts the server's HTTP together: our routes, the engine's for all others, keys, and the shape of errors."""

from __future__ import annotations

from fastapi import FastAPI

from sgl_batch.api.auth import AccessMiddleware, AccessRules
from sgl_batch.api.batches import batches_router
from sgl_batch.api.errors import add_error_handlers
from sgl_batch.api.files import files_router
from sgl_batch.api.health import health_router
from sgl_batch.api.metrics import metrics_router
from sgl_batch.api.pass_through import PassThrough
from sgl_batch.api.progress_page import progress_router
from sgl_batch.api.supervisor import EngineSupervisor
from sgl_batch.jobs.batch_service.service import BatchService


def make_app(service: BatchService, supervisor: EngineSupervisor, engine: PassThrough, rules: AccessRules) -> FastAPI:
    """The server's ASGI app."""
    # SGLang documents its own endpoints; ours are OpenAI's.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.include_router(files_router(service))
    app.include_router(batches_router(service))
    app.include_router(health_router(lambda: supervisor.state, lambda: service.storage))
    app.include_router(metrics_router(service.snapshot, supervisor, engine))
    app.include_router(progress_router(service, supervisor))
    app.router.default = engine
    add_error_handlers(app)
    app.add_middleware(AccessMiddleware, rules=rules)
    return app
