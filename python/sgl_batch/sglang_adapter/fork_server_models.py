"""Imports SGLang's model classes in a fork server's process, for its children.

It imports nothing on a machine with a GPU, where the files of some models read the GPU's abilities and so initialise
CUDA, which no fork survives.
"""

from __future__ import annotations

from contextlib import suppress

from sgl_batch.sglang_adapter.absent_packages import has_nvidia_gpu
from sgl_batch.sglang_adapter.model_classes import import_model_classes

if not has_nvidia_gpu():
    # The scheduler imports again what failed here, and reports the error; here it would end the server without one.
    with suppress(Exception):
        import_model_classes()
