"""Owns the import rules that import-linter cannot express, and the proof that its contracts can break."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# library -> the rooms or modules that may import it.
SOLE_IMPORTERS: dict[str, tuple[str, ...]] = {
    "sglang": ("sgl_batch.sglang_adapter",),
    "sqlite3": ("sgl_batch.jobs",),
    "zmq": ("sgl_batch.distributed.zmq_channel",),
    "ray": ("sgl_batch.control_plane",),
    "deep_ep": ("sgl_batch.layers.moe.token_dispatcher.deepep",),
    "deep_gemm": ("sgl_batch.layers.moe.deepgemm_experts",),
    "triton": (
        "sgl_batch.layers.moe.triton_kernels",
        "sgl_batch.layers.moe.triton_steps",
        "sgl_batch.kv_offload.page_copy_kernel",
        "sgl_batch.layers.moe.expert_runner",
    ),
    "sgl_batch_kernel": ("sgl_batch.kernel_loader",),
    # A pickle from a socket or a file can run any code. The only module that reads pickles reads tensors only.
    "pickle": ("sgl_batch.sglang_adapter.received_pickles",),
    "cloudpickle": (),
    "dill": (),
    "shelve": (),
    "marshal": (),
}
PICKLING_METHODS = {"send_pyobj", "recv_pyobj"}
# Rooms of decisions: the same state gives the same actions in the scheduler, the simulator and a replay.
PURE_ROOMS = ("sgl_batch.core", "sgl_batch.planner")
IMPURE = set(
    "asyncio datetime io logging multiprocessing os pathlib random secrets shutil socket subprocess tempfile "
    "threading time uuid numpy ray sglang torch transformers zmq".split()
)


def _within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def imported_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield each absolute module that the tree imports, also by a call with a constant name, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value, node.lineno


def wrong_importers(module: str, tree: ast.Module) -> list[str]:
    """Return the imports in `module` of libraries that belong to others."""
    faults = []
    for name, line in imported_names(tree):
        allowed = SOLE_IMPORTERS.get(name.partition(".")[0])
        if allowed is not None and not any(_within(module, room) for room in allowed):
            faults.append(f"{module}:{line} imports {name}; allowed: {', '.join(allowed) or 'no module'}")
    return faults


def pickling_calls(module: str, tree: ast.Module) -> list[str]:
    """Return the calls in `module` that pickle without importing pickle."""
    return [
        f"{module}:{node.lineno} calls {node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in PICKLING_METHODS
    ]


def impurities(module: str, tree: ast.Module) -> list[str]:
    """Return what a module of a pure room uses besides its arguments."""
    if not any(_within(module, room) for room in PURE_ROOMS):
        return []
    faults = [
        f"{module}:{line} imports {name}" for name, line in imported_names(tree) if name.partition(".")[0] in IMPURE
    ]
    faults += [
        f"{module}:{node.lineno} calls {node.func.id}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("open", "print", "input")
    ]
    return faults


def test_each_library_is_imported_only_by_its_room(package_trees: dict[str, ast.Module]) -> None:
    assert [fault for name, tree in package_trees.items() for fault in wrong_importers(name, tree)] == []


def test_nothing_is_pickled(package_trees: dict[str, ast.Module]) -> None:
    assert [fault for name, tree in package_trees.items() for fault in pickling_calls(name, tree)] == []


def test_decisions_have_no_clock_no_file_and_no_device(package_trees: dict[str, ast.Module]) -> None:
    assert [fault for name, tree in package_trees.items() for fault in impurities(name, tree)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sgl_batch.engine", "import sglang"),
        ("sgl_batch.managers.scheduler", "from sglang.srt.managers.scheduler import Scheduler"),
        ("sgl_batch.sglang_adapter_two", "import sglang.srt"),
        ("sgl_batch.cli.main", "def f():\n    import sqlite3"),
        ("sgl_batch.distributed.transport", "import zmq.asyncio"),
        ("sgl_batch.jobs.store", "import pickle"),
        ("sgl_batch.engine", "import importlib\nimportlib.import_module('sglang.srt')"),
    ],
)
def test_importer_check_sees_a_violation(module: str, source: str) -> None:
    assert len(wrong_importers(module, ast.parse(source))) == 1


def test_importer_check_lets_the_owner_import() -> None:
    assert wrong_importers("sgl_batch.jobs.store", ast.parse("import sqlite3")) == []
    assert wrong_importers("sgl_batch.sglang_adapter.version", ast.parse("import sglang.version")) == []


@pytest.mark.parametrize("source", ["import time", "from os import path", "import torch.nn", "open('x')"])
def test_purity_check_sees_a_violation(source: str) -> None:
    assert len(impurities("sgl_batch.core.admission", ast.parse(source))) == 1
    assert impurities("sgl_batch.engine", ast.parse(source)) == []


def test_pickling_check_sees_a_violation() -> None:
    assert len(pickling_calls("sgl_batch.distributed.zmq_channel", ast.parse("socket.send_pyobj(x)"))) == 1


@pytest.mark.parametrize(
    ("file", "source", "contract"),
    [
        ("core/sequence.py", "from sgl_batch.engine import engine", "Rooms know only the rooms below them"),
        ("errors.py", "def f():\n    import sgl_batch.config", "Rooms know only the rooms below them"),
        ("utils.py", "", "Rooms know only the rooms below them"),
        ("engine/engine.py", "import sglang", "Only sglang_adapter imports sglang"),
        ("core/sequence.py", "import torch", "Decisions know no device"),
        ("jobs/lines.py", "import sgl_batch.engine.engine", "Jobs know no engine's libraries"),
        ("engine/engine.py", "import zmq.asyncio", "Only the control channel imports zmq"),
    ],
)
def test_import_contracts_break_on_a_violation(
    tmp_path: Path, repo_root: Path, file: str, source: str, contract: str
) -> None:
    base = {
        "__init__.py": "",
        "errors.py": "",
        "byte_sizes.py": "",
        "config.py": "",
        "core/__init__.py": "",
        "core/sequence.py": "",
        "file_run/__init__.py": "",
        "jobs/__init__.py": "",
        "jobs/lines.py": "",
        "engine/__init__.py": "",
        "engine/engine.py": "import torch\nimport sgl_batch.sglang_adapter",
        "sglang_adapter/__init__.py": "import sglang",
    }
    assert _broken_contracts(tmp_path / "sound", repo_root, base) == ""
    assert contract in _broken_contracts(tmp_path / "broken", repo_root, {**base, file: source})


def _broken_contracts(root: Path, repo_root: Path, files: dict[str, str]) -> str:
    """Return what lint-imports reports with our contracts for a package of these files; '' if nothing."""
    for name, source in files.items():
        path = root / "sgl_batch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    result = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("lint-imports")), "--no-cache"),
            *("--config", str(repo_root / "pyproject.toml")),
        ],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if result.returncode == 0 else result.stdout + result.stderr
