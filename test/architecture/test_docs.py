"""Owns the rules for the documentation: README's length, links, and the files and commands that it names."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from sgl_batch.cli.main import main
from sgl_batch.config import BatchConfig

MAX_README_LINES = 150
# Where a path may begin: rooms are named without their package.
BASES = ("", "python/sgl_batch", "python")
NAMED_FILES = {".c", ".cpp", ".h", ".html", ".md", ".png", ".py", ".sh", ".sql", ".toml"}
FlagsOf = Callable[..., set[str]]
_FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/?")


def prose(text: str) -> str:
    """Return the page without its fenced blocks."""
    return _FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ +(.+?) *$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page that lead to no file, or to no heading of one."""
    broken = []
    for link in _LINK.findall(prose(page.read_text(encoding="utf-8"))):
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        if re.match(r"[a-z]+:", link):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            broken.append(link)
    return broken


def named_paths(text: str) -> Iterator[str]:
    """Yield texts in backticks that look like a path: `core/decide.py`, `scripts/demo`, `pyproject.toml`."""
    for code in _CODE.findall(prose(text)):
        if _PATH.fullmatch(code):
            yield code


def missing_paths(text: str, root: Path) -> list[str]:
    """Return named paths that the repository lacks: those with a source file's suffix, or in a folder that it has."""
    missing = []
    for path in named_paths(text):
        first, slash, _ = path.partition("/")
        is_ours = Path(path).suffix in NAMED_FILES or (slash and any((root / base / first).is_dir() for base in BASES))
        if is_ours and not any((root / base / path).exists() for base in BASES):
            missing.append(path)
    return missing


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in fenced blocks without a language, and of `sgl-batch ...` in backticks."""
    for language, block in _FENCE.findall(text):
        if not language:
            for line in block.replace("\\\n", " ").splitlines():
                yield shlex.split(line, comments=True)
    for code in _CODE.findall(prose(text)):
        if code.startswith("sgl-batch "):
            yield shlex.split(code)


def flags_in_source(root: Path, program: str) -> set[str] | None:
    """Return all that looks like a flag in a program's file and the Python files of its folder; None without a file."""
    if not (root / program).is_file():
        return None
    files = [root / program, *(root / program).parent.rglob("*.py")]
    return {flag for file in files for flag in _FLAG.findall(file.read_text(encoding="utf-8"))}


def wrong_commands(text: str, root: Path, flags_of: FlagsOf) -> list[str]:
    """Return programs that do not exist, and subcommands and flags that no parser knows."""
    wrong = []
    for words in commands(text):
        if not words:
            continue
        program, *rest = words
        if Path(program).name == "python" and rest[:2] == ["-m", "sgl_batch.launch_server"]:
            program, rest = "sgl-batch", ["serve", *rest[2:]]
        if Path(program).name == "python" and rest[:1] != ["-m"]:
            program, *rest = rest
        if Path(program).name == "sgl-batch":
            subcommand = rest[: 2 if rest[:1] == ["jobs"] else 1]
            known = flags_of(*subcommand)
            wrong += [" ".join(subcommand)] * (not known)
            wrong += [f"{' '.join(subcommand)} {flag}" for flag in _FLAG.findall(" ".join(rest)) if flag not in known]
        elif "/" in program and ".venv" not in program:
            known = flags_in_source(root, program)
            wrong += [program] * (known is None)
            wrong += [
                f"{program} {flag}" for flag in _FLAG.findall(" ".join(rest)) if known is not None and flag not in known
            ]
    return wrong


@pytest.fixture
def flags_of(capsys: pytest.CaptureFixture[str]) -> FlagsOf:
    """Return a function that gives the flags in the help of a subcommand; none if there is no such subcommand."""

    @cache
    def flags(*subcommand: str) -> set[str]:
        try:
            code = main([*subcommand, "--help"])
        except SystemExit as end:
            code = int(end.code or 0)
        text = capsys.readouterr().out
        # The server's short help leaves out some flags of the engine.
        all_of_ours = BatchConfig().flat() if subcommand == ("serve",) else {}
        generated = {f"--{name.replace('_', '-')}" for name in all_of_ours}
        return set() if code else generated | set(_FLAG.findall(text))

    return flags


@pytest.fixture(scope="session")
def pages(repo_root: Path) -> list[Path]:
    """Return the pages that a user or contributor reads."""
    return [repo_root / "README.md", repo_root / "CONTRIBUTING.md", *sorted((repo_root / "docs").glob("*.md"))]


def test_the_readme_is_short(repo_root: Path) -> None:
    assert len((repo_root / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_every_link_of_a_page_leads_somewhere(pages: list[Path]) -> None:
    assert {page.name: found for page in pages if (found := broken_links(page))} == {}


def test_every_page_is_linked_from_the_readme(pages: list[Path], repo_root: Path) -> None:
    text = (repo_root / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in pages[1:] if f"({page.relative_to(repo_root)})" not in text] == []


def test_every_file_that_a_page_names_exists(pages: list[Path], repo_root: Path) -> None:
    texts = {page.name: page.read_text(encoding="utf-8") for page in pages}
    assert sum(len(list(named_paths(text))) for text in texts.values()) > 100
    assert {name: found for name, text in texts.items() if (found := missing_paths(text, repo_root))} == {}


def test_every_command_of_a_page_is_known(pages: list[Path], repo_root: Path, flags_of: FlagsOf) -> None:
    texts = {page.name: page.read_text(encoding="utf-8") for page in pages}
    assert {name: found for name, text in texts.items() if (found := wrong_commands(text, repo_root, flags_of))} == {}


def test_the_checks_see_planted_faults(tmp_path: Path, repo_root: Path, flags_of: FlagsOf) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `title`, twice\n[a](page.md#a-title-twice) [b](#other) [c](gone.md) [d](https://x.test/e.md)\n"
    )
    assert broken_links(page) == ["#other", "gone.md"]
    text = "`core/decide.py` `core/gone.py` `gone.py` `scripts/gone` `test/unit/` `out.jsonl` `/metrics` `v1/files`"
    assert missing_paths(text, repo_root) == ["core/gone.py", "gone.py", "scripts/gone"]
    text = (
        "```\nsgl-batch run --model M \\\n    --gone 3  # --comment\nx/sgl-batch jobs gone ID\n"
        "python benchmark/gone.py\npython benchmark/knee.py --model M --lost\nscripts/gone\n"
        "scripts/wheelhouse w --cpu --away\n"
        ".venv/bin/python -m sgl_batch.launch_server --jobs-dir J --absent\n```\n`sgl-batch trace F --missing`\n"
    )
    assert wrong_commands(text, repo_root, flags_of) == [
        "run --gone",
        "jobs gone",
        "benchmark/gone.py",
        "benchmark/knee.py --lost",
        "scripts/gone",
        "scripts/wheelhouse --away",
        "serve --absent",
        "trace --missing",
    ]
