"""Owns samples of the memory of each process of a tree, by role. It sets no limit."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import psutil

COMMAND = "command"
OTHERS = "others"
# SGLang's process titles, cut to the 15 characters that remain while a process ends.
_TITLED = {"sglang::schedul": "scheduler", "sglang::detoken": "detokenizer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Resident bytes (rss), and those that no other process shares (uss), which grow when other processes end."""

    rss_bytes: int
    uss_bytes: int

    def plus(self, other: Memory) -> Memory:
        return Memory(rss_bytes=self.rss_bytes + other.rss_bytes, uss_bytes=self.uss_bytes + other.uss_bytes)


def role_of(title: str, *, is_root: bool) -> str:
    """Return the role of a process, from the title that SGLang gives it."""
    if is_root:
        return COMMAND
    return next((role for start, role in _TITLED.items() if title.startswith(start)), OTHERS)


def sample_tree(pid: int) -> dict[str, Memory]:
    """Return the memory of a process and all below it, by role; {} if it has ended."""
    found: dict[str, Memory] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            # A process may end between the listing and the reading; a zombie has no memory to read.
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                full = process.memory_full_info()
                role = role_of(process.name(), is_root=process.pid == pid)
                memory = Memory(rss_bytes=full.rss, uss_bytes=full.uss)
                found[role] = memory.plus(found[role]) if role in found else memory
    return found


@dataclass(slots=True)
class Samples:
    """Samples of one tree in the order of time."""

    taken: list[dict[str, Memory]] = field(default_factory=list)

    def roles(self) -> list[str]:
        """Return the roles that occur, in the order of their first sample."""
        return list(dict.fromkeys(role for sample in self.taken for role in sample))

    def peak(self, role: str) -> Memory:
        """Return the most that a role held in any sample."""
        return _peak(self.taken, role)

    def late_growth_bytes(self, role: str) -> int:
        """Return by how much a role's resident peak in the second half of the samples is above that in the first."""
        middle = len(self.taken) // 2
        return _peak(self.taken[middle:], role).rss_bytes - _peak(self.taken[:middle], role).rss_bytes


def _peak(samples: list[dict[str, Memory]], role: str) -> Memory:
    held = [sample[role] for sample in samples if role in sample]
    return Memory(
        rss_bytes=max((memory.rss_bytes for memory in held), default=0),
        uss_bytes=max((memory.uss_bytes for memory in held), default=0),
    )
