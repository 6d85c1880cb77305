"""Owns the head start of an engine's processes: they are imported for while the program still imports `Engine`.

Both imports take seconds of one core each. It imports nothing slow itself.
"""

from __future__ import annotations

import multiprocessing
import os
import sys

from sgl_batch.sglang_adapter.child_processes import begin_fork_server
from sgl_batch.sglang_adapter.names import CPU_PLATFORM
from sgl_batch.startup.hardware import has_gpu_driver

# What an engine's fork server imports.
PRELOADED = ("sgl_batch.engine.process_spec", "sgl_batch.sglang_adapter.fork_server_models")
_ENGINE = "sgl_batch.engine.engine"
_PLATFORM = "SGLANG_PLATFORM"


def begin_fork_server_early() -> None:
    """Start the fork server of an engine that this program will make, where its import of `Engine` leaves a core free.

    Not in child processes, where a program's module may be imported again, and not on a machine with a GPU, whose
    engines do not fork. A program that makes no engine, or one in another environment, has a process for nothing: it
    ends with the program, or when another fork server starts.
    """
    is_begun = _ENGINE in sys.modules
    is_begun |= os.environ.get(_PLATFORM) == CPU_PLATFORM  # in a program of ours, which forks its processes itself
    is_child = multiprocessing.parent_process() is not None
    if is_begun or is_child or len(os.sched_getaffinity(0)) < 2 or has_gpu_driver():
        return
    begin_fork_server(CPU_PLATFORM, PRELOADED)
