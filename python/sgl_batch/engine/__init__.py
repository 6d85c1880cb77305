"""The engine: its Python API, its process tree, and the connection to an engine in another process.

`Engine` is imported on first use: the server's process only talks to an engine, and imports no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_batch.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from sgl_batch.engine.head_start import begin_fork_server_early

        begin_fork_server_early()
        from sgl_batch.sglang_adapter.bootstrap import collector_paused

        with collector_paused():
            from sgl_batch.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
