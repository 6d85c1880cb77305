"""Owns how much memory each process of a tree holds, sampled by role; decides nothing about how much is too much."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import psutil

COMMAND = "command"
OTHERS = "others"
# The beginnings of SGLang's titles that are left of them, cut to 15 characters, while a process ends.
_TITLED = {"sglang::schedul": "scheduler", "sglang::detoken": "detokenizer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Resident bytes (rss), and those of them that no other process shares (uss): more, once the others have ended."""

    rss_bytes: int
    uss_bytes: int

    def plus(self, other: Memory) -> Memory:
        return Memory(rss_bytes=self.rss_bytes + other.rss_bytes, uss_bytes=self.uss_bytes + other.uss_bytes)


def role_of(title: str, *, is_root: bool) -> str:
    """The part that a process plays, from the title that SGLang gives it."""
    if is_root:
        return COMMAND
    return next((role for start, role in _TITLED.items() if title.startswith(start)), OTHERS)


def sample_tree(pid: int) -> dict[str, Memory]:
    """What the process and all below it hold now, by role; {} when it has ended."""
    found: dict[str, Memory] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            # One that ends between the listing and the reading holds nothing; a zombie has no memory to read.
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
        """The roles that occur, in the order in which they first do."""
        return list(dict.fromkeys(role for sample in self.taken for role in sample))

    def peak(self, role: str) -> Memory:
        """The most that a role held in any sample."""
        return _peak(self.taken, role)

    def late_growth_bytes(self, role: str) -> int:
        """How far a role's resident peak in the second half of the samples lies above that in the first half."""
        middle = len(self.taken) // 2
        return _peak(self.taken[middle:], role).rss_bytes - _peak(self.taken[:middle], role).rss_bytes


def _peak(samples: list[dict[str, Memory]], role: str) -> Memory:
    held = [sample[role] for sample in samples if role in sample]
    return Memory(
        rss_bytes=max((memory.rss_bytes for memory in held), default=0),
        uss_bytes=max((memory.uss_bytes for memory in held), default=0),
    )
