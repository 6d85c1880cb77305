"""Serves an ASGI app over a real socket inside a test's event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from sgl_batch.api.http_protocol import StrictProtocol


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """Serve the app, and give its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    # asyncio does this for sockets that it makes itself. Without it each answer on a kept connection takes 40 ms more.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical", http=StrictProtocol))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await serving
