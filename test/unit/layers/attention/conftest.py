"""Makes the paged sequences importable for the tests of this directory, and runs these with each kind of operators."""

from __future__ import annotations

import pytest

from sgl_batch.kernel_loader import native_kernels


@pytest.fixture(params=["native", "torch"], autouse=True)
def operators(request, monkeypatch):
    """The implementation of attention: the native kernels, or torch operators as if those were not installed."""
    if request.param == "torch":
        monkeypatch.setattr("sgl_batch.mem_cache.device_page_pool.native_kernels", lambda: None)
        monkeypatch.setattr("sgl_batch.layers.attention.cpu_paged.native_kernels", lambda: None)
    else:
        assert native_kernels() is not None, "the native kernels are installed where tests run"
    return request.param
