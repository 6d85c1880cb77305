"""An SGLang that we do not know is refused before it is imported, and torchvision loads with a CPU torch."""

from __future__ import annotations

import gc
import importlib.metadata
import subprocess
import sys
import tomllib

import pytest

from sgl_batch.errors import ConfigError
from sgl_batch.sglang_adapter import bootstrap


@pytest.fixture
def installed(monkeypatch):
    """Pretend that another SGLang, or none, is installed."""

    def pretend(version: str | None) -> None:
        def answer(package: str) -> str:
            assert package == "sglang"
            if version is None:
                raise importlib.metadata.PackageNotFoundError(package)
            return version

        monkeypatch.setattr(importlib.metadata, "version", answer)

    return pretend


@pytest.mark.parametrize("version", bootstrap.KNOWN_SGLANG_VERSIONS)
def test_a_known_version_is_taken(installed, version):
    installed(version)
    assert bootstrap.sglang_version() == version


@pytest.mark.parametrize("version", ["0.5.15", "0.5.16rc1", "0.5.16.post1", "0.5.160", "1.0"])
def test_an_unknown_version_is_refused_with_those_that_are_known(installed, version):
    installed(version)
    known = bootstrap.KNOWN_SGLANG_VERSIONS
    what, remedy = f"sglang {version} is installed", f"install sglang=={known[-1]}"
    with pytest.raises(ConfigError, match=f"^{what}, .* knows only {', '.join(known)}, .*; {remedy}$"):
        bootstrap.prepare()


def test_without_sglang_the_error_says_how_to_install_it(installed):
    installed(None)
    with pytest.raises(ConfigError, match=r"sglang is not installed; install sglang==.*scripts/install"):
        bootstrap.sglang_version()


def test_the_version_that_a_gpu_machine_installs_is_one_that_is_known(repo_root):
    project = tomllib.loads((repo_root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["optional-dependencies"]["cuda"] == [f"sglang=={bootstrap.KNOWN_SGLANG_VERSIONS[-1]}"]


def test_the_adapter_alone_imports_no_sglang_and_torchvision_loads_once_it_has_prepared():
    program = (
        "import sys\n"
        "from sgl_batch.sglang_adapter import bootstrap\n"
        "assert not {'sglang', 'torch'} & set(sys.modules), 'imported too early'\n"
        "bootstrap.prepare()\n"
        "bootstrap.prepare()\n"
        "assert 'sglang' not in sys.modules, 'imported by prepare'\n"
        "import torchvision\n"
        "print('loaded')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr


def test_nothing_is_compiled_while_sglang_is_imported_and_everything_afterwards():
    import torch

    compile_ = torch.compile
    with bootstrap.importing(), bootstrap.importing():

        @torch.compile(dynamic=True)
        def twice(x: int) -> int:
            return 2 * x

        assert twice is torch.compile(twice)
        assert twice(3) == 6
    assert torch.compile is compile_


def test_the_collector_leaves_alone_for_good_what_is_there_after_an_import():
    gc.unfreeze()
    kept = [object()]
    with bootstrap.importing(), bootstrap.importing():
        assert not gc.isenabled()
        kept.append([kept])
    assert gc.isenabled()
    assert not any(one is kept for one in gc.get_objects()), "the collector would look at it"


def test_a_collector_that_is_off_stays_off_and_nothing_is_kept_from_it():
    gc.unfreeze()
    gc.disable()
    try:
        with bootstrap.importing():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
        gc.freeze()


def test_the_processes_of_a_fork_server_have_a_collector(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import gc, multiprocessing\n"
        "from sgl_batch.sglang_adapter import fork_server\n"
        "def child():\n"
        "    assert gc.isenabled() and gc.get_freeze_count() > 0\n"
        "    print('collects')\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('forkserver')\n"
        "    with fork_server.served_by_fork_server(['json']):\n"
        "        process = context.Process(target=child)\n"
        "        process.start()\n"
        "    process.join()\n"
        "    assert process.exitcode == 0\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "collects\n"), done.stderr
