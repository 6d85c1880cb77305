"""Owns the rule of composition over inheritance: no concrete class of the package extends another one."""

from __future__ import annotations

import ast

import pytest

# What a class of the package may extend: errors, messages, and classes of SGLang that the adapter exports.
_FREE_ROOTS = {"Exception", "Struct", "Enum", "NamedTuple"}
_ABSTRACT = {"ABC", "Protocol"}


def _name_of(base: ast.expr) -> str:
    node = base.value if isinstance(base, ast.Subscript) else base
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def classes_of(trees: dict[str, ast.Module]) -> dict[str, tuple[str, ast.ClassDef]]:
    """Return every class by its name, with its module; names are unique enough to follow a base by name."""
    return {
        node.name: (module, node)
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def _ancestors(name: str, classes: dict[str, tuple[str, ast.ClassDef]]) -> set[str]:
    """Return the names of all classes that a class extends, in the package and outside."""
    found: set[str] = set()
    left = [name]
    while left:
        one = left.pop()
        bases = set(map(_name_of, classes[one][1].bases)) - found if one in classes else set()
        found |= bases
        left += bases
    return found


def _is_abstract(node: ast.ClassDef) -> bool:
    """Return whether a class cannot be instantiated: a Protocol, or one with abstract methods."""
    marked = {"abstractmethod"} & {
        _name_of(decorator)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
        for decorator in method.decorator_list
    }
    return bool(_ABSTRACT & set(map(_name_of, node.bases))) or bool(marked)


def inheritances(trees: dict[str, ast.Module]) -> list[str]:
    """Return the concrete classes that extend concrete classes, except where that is allowed."""
    classes = classes_of(trees)
    faults = []
    for name, (module, node) in classes.items():
        if _FREE_ROOTS & _ancestors(name, classes) or module.startswith("sgl_batch.sglang_adapter"):
            continue
        for base in map(_name_of, node.bases):
            if base not in classes or base == name:
                continue
            base_module, base_node = classes[base]
            if not _is_abstract(base_node) and not base_module.startswith("sgl_batch.sglang_adapter"):
                faults.append(f"{module}: {name} extends {base}")
    return faults


def test_no_concrete_class_extends_a_concrete_class(package_trees: dict[str, ast.Module]) -> None:
    assert inheritances(package_trees) == []


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("class A: pass\nclass B(A): pass", 1),
        ("class A(ABC):\n  @abstractmethod\n  def f(self): ...\nclass B(A): pass\nclass C(B): pass", 1),
        ("class A(Protocol): pass\nclass B(A): pass", 0),
        ("class A(Exception): pass\nclass B(A): pass", 0),
        ("class A(msgspec.Struct): pass\nclass B(A): pass", 0),
        ("class A(Scheduler): pass", 0),
    ],
)
def test_the_check_sees_a_violation(source: str, faults: int) -> None:
    assert len(inheritances({"sgl_batch.managers.x": ast.parse(source)})) == faults
