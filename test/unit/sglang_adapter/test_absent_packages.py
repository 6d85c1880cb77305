"""SGLang imports names of packages that are missing; using one raises an error that names the package to install."""

from __future__ import annotations

import os
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sgl_batch.errors import ConfigError
from sgl_batch.sglang_adapter import absent_packages, bootstrap
from sgl_batch.sglang_adapter.absent_packages import has_flash_attention_3, stand_ins


def test_names_of_a_missing_package_can_be_imported_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import xgrammar

    monkeypatch.setattr(absent_packages, "is_installed", lambda package: False)
    monkeypatch.setattr(absent_packages, "has_nvidia_gpu", lambda: True)
    monkeypatch.setenv("SGLANG_IS_FLASHINFER_AVAILABLE", "true")
    with stand_ins():
        from flashinfer.sampling import min_p_sampling_from_probs
        from xgrammar import GrammarCompiler, get_model_structural_tag

        with pytest.raises(ImportError, match="cannot import name 'mm_fp4'"):
            from flashinfer import mm_fp4  # noqa: F401
    with pytest.raises(ImportError, match=r"flashinfer is not installed, .*: pip install flashinfer_python=="):
        min_p_sampling_from_probs()
    with pytest.raises(ImportError, match="xgrammar is not installed"):
        GrammarCompiler(info=None)
    assert get_model_structural_tag is None
    assert sys.modules["xgrammar"] is xgrammar
    assert "flashinfer" not in sys.modules
    assert os.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] == "false"


def test_on_a_cpu_flashinfer_is_left_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_IS_FLASHINFER_AVAILABLE", raising=False)
    with stand_ins():
        assert "flashinfer" not in sys.modules
    assert "SGLANG_IS_FLASHINFER_AVAILABLE" not in os.environ


def test_kernels_without_flash_attention_are_distinguished_from_complete_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it is not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert not has_flash_attention_3()
    (package / "flash_ops.abi3.so").touch()
    assert has_flash_attention_3()


def test_without_sglangs_kernels_on_a_gpu_the_error_names_what_installs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(bootstrap, "is_installed", lambda package: False)
    bootstrap._check_kernels.cache_clear()
    with pytest.raises(ConfigError, match=r"has a GPU, and SGLang's kernels .* pip install 'sgl-batch.cuda.'"):
        bootstrap.prepare()
    bootstrap._check_kernels.cache_clear()


def test_requirements_of_packages_are_those_of_sglang() -> None:
    required = {name.replace("-", "_").lower() for name in map(_pinned, requires("sglang") or ())}
    assert {name.replace("-", "_") for name in absent_packages.REQUIREMENTS.values()} <= required


def _pinned(requirement: str) -> str:
    """NAME==VERSION of a line of metadata, without extras."""
    read = Requirement(requirement)
    return f"{read.name}{read.specifier}"
