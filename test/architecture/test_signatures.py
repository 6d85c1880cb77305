"""Owns the rule that managers and model runners declare types for SGLang's objects: no signature has `Any`.

Nor has a declaration of an attribute. The exceptions are values without a type, which are listed here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

_ARGUMENTS = "arguments by their names, as users give them: of any type, until SGLang has read them"
_ANSWER = "an answer's JSON, whose form is OpenAI's"
_STATS = "a rank's statistics as JSON, which go through SGLang to the engine's process"
WITHOUT_TYPE = {
    "startup.argument_checks: check_ranges": _ARGUMENTS,
    "engine.launch: _rank_arguments": _ARGUMENTS,
    "engine.launch: default_arguments": _ARGUMENTS,
    "engine.launch: sglang_arguments": _ARGUMENTS,
    "engine.launch: verify": _STATS,
    "engine.process_spec: ProcessSpec.infos": _STATS,
    "engine.process_spec: _rank_context": "SGLang's arguments of a process by position, each of another type",
    "engine.line_answers: LineAnswers._answer": _ANSWER,
    "engine.line_answers: _is_aborted": _ANSWER,
    "engine.line_answers: _is_engines_own_abort": _ANSWER,
    "engine.rank_stats: engine_stats": _STATS,
    "engine.rank_stats: merged_stats": _STATS,
}
ROOMS = tuple(f"sgl_batch.{room}." for room in ("managers", "metrics", "model_executor", "requests", "startup"))
# Of other rooms, the modules that work with SGLang's requests, batches and layers.
MODULES = tuple(
    f"sgl_batch.{module}"
    for module in (
        "engine.launch",
        "engine.line_answers",
        "engine.process_spec",
        "engine.rank_stats",
        "engine.worker_server",
        "kv_offload.device_kv",
        "kv_offload.exclusive_kv",
        "kv_offload.kv_choice",
        "kv_offload.kv_form",
        "kv_offload.kv_tiers",
        "kv_offload.prompt_sharing",
        "kv_offload.store_kv",
        "kv_offload.stored_kv",
        "kv_offload.streamed_kv",
        "kv_offload.streamed_rows",
        "weights.loaded_weights",
        "weights.streamed_weights",
        "weights.weight_streamer",
    )
)


def _annotations(node: ast.AST) -> list[ast.expr | None]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        every = node.args
        given = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
        return [node.returns, *(argument.annotation for argument in given if argument is not None)]
    return []


def _has_any(annotation: ast.expr | None) -> bool:
    names = () if annotation is None else ast.walk(annotation)
    return any("Any" in (getattr(name, "id", ""), getattr(name, "attr", "")) for name in names)


def _declarations_with_any(node: ast.AST, inside: str = "", *, in_function: bool = False) -> Iterator[str]:
    """Yield the functions, attributes and constants under `node` that are declared with `Any`, by dotted names."""
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{inside}.{child.name}".lstrip(".")
            if any(map(_has_any, _annotations(child))):
                yield name
        elif isinstance(child, ast.AnnAssign) and _has_any(child.annotation):
            is_attribute = isinstance(child.target, ast.Attribute)
            if is_attribute or not in_function:
                yield f"{inside}.{ast.unparse(child.target)}".lstrip(".")
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        yield from _declarations_with_any(
            child, name, in_function=is_function or (in_function and not isinstance(child, ast.ClassDef))
        )


def untyped(module: str, tree: ast.Module) -> set[str]:
    """Return the declarations of a module with `Any`."""
    return {f"{module.removeprefix('sgl_batch.')}: {name}" for name in _declarations_with_any(tree)}


def test_signatures_use_any_only_where_no_type_exists(package_trees: dict[str, ast.Module]) -> None:
    found = {
        name
        for module, tree in package_trees.items()
        if module.startswith(ROOMS) or module in MODULES
        for name in untyped(module, tree)
    }
    assert found == set(WITHOUT_TYPE)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f(request: Any): ...", "f"),
        ("async def f(*args: Any): ...", "f"),
        ("def f() -> list[tuple[Any, int]]: ...", "f"),
        ("class A:\n  def f(self, x: typing.Any | None): ...", "A.f"),
        ("class A:\n  x: dict[str, Any]", "A.x"),
        ("class A:\n  def f(self):\n    self.x: Any = 1", "A.f.self.x"),
        ("def f():\n  def g(**kwargs: Any): ...", "f.g"),
        ("TABLE: dict[str, Any] = {}", "TABLE"),
    ],
)
def test_the_check_sees_any(source: str, name: str) -> None:
    assert untyped("sgl_batch.managers.x", ast.parse(source)) == {f"managers.x: {name}"}


@pytest.mark.parametrize("source", ["def f(x: object): ...", "def f():\n  x: Any = 1", "from typing import Any"])
def test_the_check_accepts_other_annotations(source: str) -> None:
    assert untyped("sgl_batch.managers.x", ast.parse(source)) == set()
