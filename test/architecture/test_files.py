"""Owns the rules for every file: its size, a first line that says what it owns, no machine-specific names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
TOP_LEVEL = {"pyproject.toml", "python", "sgl-kernel", "test", "benchmark", "scripts", "README.md", "LICENSE"}
TOP_LEVEL |= {".ci", ".gitignore", "docs", "CONTRIBUTING.md"}
CODE_SUFFIXES = {".py", ".sh", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
VAGUE_NAMES = {"utils", "util", "common", "misc", "helpers"}

# Written in pieces, so that this file does not break its own rule.
_HOSTS = [f"{name}.org" for name in ("pypi", "pythonhosted", "download.pytorch", "npmjs", "anaconda")]
_HOSTS += [f"{name}.io" for name in ("crates", "docker", "ghcr", "quay", "nvcr")]
_FOLDERS = ("work", "home", "Users", "root", "opt")
# A folder counts only where a path starts: `tests/work/x` is not the root's `work`.
MACHINE_NAMES = re.compile(
    "|".join(re.escape(host) for host in _HOSTS)
    + rf"|(?<![\w./:~-])/(?:{'|'.join(_FOLDERS)})/\w+"
    + r"|\b[A-Z]:\\Users"
)


def lines_over_limit(text: str, limit: int = MAX_FILE_LINES) -> int:
    """Return by how many lines the text is too long; 0 if it is not."""
    return max(0, len(text.splitlines()) - limit)


def long_functions(tree: ast.Module) -> list[str]:
    """Return the functions that are longer than the limit, with their lengths."""
    spans = [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return [f"{name}: {lines} lines" for name, lines in spans if lines > MAX_FUNCTION_LINES]


def lacks_first_line(tree: ast.Module) -> bool:
    """Return whether the module's docstring is missing or has an empty first line."""
    return not (ast.get_docstring(tree) or "").split("\n")[0].strip()


def machine_names(text: str) -> list[str]:
    """Return registry hosts and paths of one developer's machine in the text, each with its line number."""
    return [
        f"{number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for match in MACHINE_NAMES.finditer(line)
    ]


def _text(path: Path) -> str | None:
    """Return the file's text, or None for a binary file."""
    data = path.read_bytes()
    return None if b"\0" in data[:8192] else data.decode("utf-8", errors="replace")


def _is_code(path: Path) -> bool:
    if path.suffix in CODE_SUFFIXES:
        return True
    return not path.suffix and (_text(path) or "").startswith("#!")


def test_the_top_folder_holds_only_expected_entries(our_files: list[Path], repo_root: Path) -> None:
    assert {path.relative_to(repo_root).parts[0] for path in our_files} <= TOP_LEVEL


def test_no_code_file_is_over_500_lines(our_files: list[Path]) -> None:
    code = [path for path in our_files if _is_code(path)]
    assert code, "no code found"
    assert [str(path) for path in code if lines_over_limit(path.read_text(encoding="utf-8"))] == []


def test_no_function_of_the_package_is_over_80_lines(package_trees: dict[str, ast.Module]) -> None:
    assert {name: found for name, tree in package_trees.items() if (found := long_functions(tree))} == {}


def test_every_package_file_says_what_it_owns(package_trees: dict[str, ast.Module]) -> None:
    assert [name for name, tree in package_trees.items() if lacks_first_line(tree)] == []


def test_no_module_has_a_catch_all_name(package_trees: dict[str, ast.Module]) -> None:
    assert [name for name in package_trees if VAGUE_NAMES & set(name.split("."))] == []


def test_no_file_names_a_registry_host_or_a_developers_machine(our_files: list[Path]) -> None:
    faults = {
        str(path): found for path in our_files if (text := _text(path)) is not None and (found := machine_names(text))
    }
    assert faults == {}


def test_size_checks_see_a_violation() -> None:
    assert lines_over_limit("x\n" * 500) == 0
    assert lines_over_limit("x\n" * 501) == 1
    body = "    x = 1\n" * 80
    assert long_functions(ast.parse(f"def f():\n{body}")) == ["f: 81 lines"]
    assert long_functions(ast.parse("def f():\n    x = 1\n")) == []


def test_docstring_check_sees_a_violation() -> None:
    assert lacks_first_line(ast.parse("import os"))
    assert lacks_first_line(ast.parse('"""  \n"""'))
    assert not lacks_first_line(ast.parse('"""Owns one thing."""'))


@pytest.mark.parametrize(
    "text",
    [f"see https://{_HOSTS[0]}/simple", *(f"open('/{folder}/ann/x')" for folder in _FOLDERS)],
)
def test_path_check_sees_a_violation(text: str) -> None:
    assert len(machine_names(f"first line\n{text}\n")) == 1


@pytest.mark.parametrize("text", ["test/work/main", "a homework/x", "/usr/bin/env", "./home/x"])
def test_path_check_leaves_ordinary_paths_alone(text: str) -> None:
    assert machine_names(text) == []
