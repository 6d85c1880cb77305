"""Owns the fixtures of the architecture tests: the syntax trees of the package and the files of the repository."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

_NOT_OURS = {".git", ".venv", "demo-out", "build", "dist", "__pycache__"}


@pytest.fixture(scope="session")
def package_trees(repo_root: Path) -> dict[str, ast.Module]:
    """Return every module of sgl_batch by its dotted name, parsed."""
    root = repo_root / "python"
    trees = {}
    for path in sorted((root / "sgl_batch").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    assert "sgl_batch" in trees, f"no package under {root}"
    return trees


@pytest.fixture(scope="session")
def our_files(repo_root: Path) -> list[Path]:
    """Return every file that is or would be committed; without git, every file outside the ignored folders."""
    listing = subprocess.run(
        ["git", "-C", str(repo_root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listing.returncode == 0 and listing.stdout:
        paths = [repo_root / name for name in listing.stdout.decode().split("\0") if name]
        return [path for path in paths if path.is_file()]
    return [
        path
        for path in repo_root.rglob("*")
        if path.is_file()
        and not any(
            part in _NOT_OURS or part.endswith(("_cache", ".egg-info")) for part in path.relative_to(repo_root).parts
        )
    ]
