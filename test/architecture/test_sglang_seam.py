"""Owns the rule that only sglang_adapter writes into SGLang's modules, classes and tables."""

from __future__ import annotations

import ast

import pytest

ADAPTER = "sgl_batch.sglang_adapter"
_SETTERS = {"setattr", "delattr"}


def _absolute(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    """Return the absolute name of what `from X import ...` in `module` imports from."""
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, node.module] if node.module else base)


def _is_foreign(name: str) -> bool:
    return any(name == root or name.startswith(root + ".") for root in ("sglang", ADAPTER))


def foreign_names(module: str, tree: ast.Module, is_package: bool = False) -> set[str]:
    """Return the names in the tree that are bound to something of SGLang's or of the adapter's."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            # `import sgl_batch.sglang_adapter` binds `sgl_batch`: writing through it is a fault as well.
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names if _is_foreign(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, is_package, node)
            names |= {
                alias.asname or alias.name
                for alias in node.names
                if _is_foreign(source) or _is_foreign(f"{source}.{alias.name}")
            }
    return names


def _root(node: ast.expr) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
        targets = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        targets = [node.optional_vars]
    else:
        return []
    flat = []
    while targets:
        target = targets.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            targets = [*targets, *target.elts]
        else:
            flat.append(target.value if isinstance(target, ast.Starred) else target)
    return flat


def _sets_by_call(node: ast.AST, names: set[str]) -> bool:
    """Return whether a call sets: setattr(X, ...), object.__setattr__(X, ...), patch.object(X, ...), X.update(...)."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    first = _root(node.args[0]) if node.args else None
    if called in {*_SETTERS, "__setattr__", "__delattr__"} or ast.unparse(node.func).endswith("patch.object"):
        return first in names
    return called == "update" and isinstance(node.func, ast.Attribute) and _root(node.func.value) in names


def writes_into_sglang(module: str, tree: ast.Module, is_package: bool = False) -> list[str]:
    """Return the statements of the tree that assign to, delete from or replace something of SGLang's."""
    names = foreign_names(module, tree, is_package)
    faults = []
    for node in ast.walk(tree):
        for target in _targets(node):
            written = isinstance(target, (ast.Attribute, ast.Subscript)) and _root(target) in names
            replaced = isinstance(target, ast.Subscript) and ast.unparse(target).startswith("sys.modules['sglang")
            if written or replaced:
                faults.append(f"{module}:{target.lineno} assigns {ast.unparse(target)}")
        if _sets_by_call(node, names):
            faults.append(f"{module}:{node.lineno} {ast.unparse(node)}")
    return faults


def test_sglang_is_patched_only_in_the_adapter(package_trees: dict[str, ast.Module]) -> None:
    packages = {name.rpartition(".")[0] for name in package_trees}
    faults = [
        fault
        for name, tree in package_trees.items()
        if name != ADAPTER and not name.startswith(ADAPTER + ".")
        for fault in writes_into_sglang(name, tree, is_package=name in packages)
    ]
    assert faults == []


@pytest.mark.parametrize(
    "source",
    [
        "from sgl_batch.sglang_adapter import Scheduler\nScheduler.run_batch = None",
        "from ..sglang_adapter import Scheduler as S\nS.run_batch = None",
        "from sgl_batch import sglang_adapter\nsglang_adapter.scheduler.Scheduler = None",
        "import sgl_batch.sglang_adapter as seam\nseam.x, y = 1, 2",
        "import sgl_batch.sglang_adapter\nsgl_batch.sglang_adapter.x = 1",
        "from sgl_batch.sglang_adapter.moe import TABLE\nTABLE['key'] = 1",
        "from sgl_batch.sglang_adapter import ModelRegistry\nModelRegistry.models.update(a=1)",
        "from sgl_batch.sglang_adapter import Req\nsetattr(Req, 'x', 1)",
        "from sgl_batch.sglang_adapter import Req\ndel Req.x",
        "from sgl_batch.sglang_adapter import Req\nReq.count += 1",
        "import sys\nsys.modules['sglang.srt.utils'] = None",
    ],
)
def test_seam_check_sees_a_write(source: str) -> None:
    assert len(writes_into_sglang("sgl_batch.managers.scheduler", ast.parse(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from sgl_batch.sglang_adapter import Scheduler\nclass Ours(Scheduler):\n    run_batch = None",
        "from sgl_batch.sglang_adapter import Scheduler\ns = Scheduler()\ns.own = 1",
        "from sgl_batch.core import plan\nplan.x = 1",
    ],
)
def test_seam_check_leaves_subclasses_and_our_own_objects_alone(source: str) -> None:
    assert writes_into_sglang("sgl_batch.managers.scheduler", ast.parse(source)) == []
