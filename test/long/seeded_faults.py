"""Seeds faults into the decisions, one at a time in a copy of the package, and reports which of them the tests catch.

    python test/long/seeded_faults.py [NUMBER ...]

Exit code 1 if a fault is not caught. A fault replaces a line of the source. If the source no longer has the line, the
fault is reported as NOT THERE and has to be rewritten.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A replacement of `old` by `new` in a module of core. `tests`: the tests of the rule that it breaks."""

    what: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]

    def source(self, package: Path) -> Path:
        """Return the file of the module in a copy of the package."""
        return package / "core" / f"{self.module}.py"

    def test_files(self) -> list[Path]:
        """Return the files of the tests."""
        return [_ROOT / "test" / "unit" / "core" / name for name in self.tests]


def _fault(what: str, module: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(what=what, module=module, old=old, new=new, tests=tests)


FAULTS = (
    _fault(
        "a chunk of a prompt begins again instead of continuing",
        "page_boundary",
        "start = self.begun.computed_tokens",
        "start = self.begun.shared_tokens",
        "test_compose.py",
    ),
    _fault(
        "a prompt is cut in the middle of a page",
        "compose",
        "room // plan.page_size * plan.page_size",
        "room",
        "test_compose.py",
    ),
    _fault(
        "a runner is not extended up to the next boundary",
        "residency",
        "pages_for(tokens, size) + FREE_PAGES, pages_for(tokens + plan.boundary_tokens, size)",
        "pages_for(tokens, size), pages_for(tokens, size)",
        "test_residency.py",
    ),
    _fault("the least decoded are suspended", "residency", "reverse=True", "reverse=False", "test_residency.py"),
    _fault(
        "a sequence is restored past the room there is",
        "residency",
        "        if takes > room:\n            break\n",
        "",
        "test_residency.py",
    ),
    _fault(
        "a sequence that does not fit is passed by those behind it",
        "residency",
        "        if takes > room:\n            break\n",
        "        if takes > room:\n            continue\n",
        "test_residency.py",
    ),
    _fault(
        "the decode group takes one too many back",
        "residency",
        "len(restore) >= plan.decode.b_moe",
        "len(restore) > plan.decode.b_moe",
        "test_residency.py",
    ),
    _fault("a refill is out of order", "page_boundary", "nsmallest", "nlargest", "test_page_boundary.py"),
    _fault(
        "a boundary is late by a step",
        "page_boundary",
        "state.steps >= plan.boundary_tokens",
        "state.steps > plan.boundary_tokens",
        "test_page_boundary.py",
    ),
    _fault(
        "prefill goes on when enough are ready",
        "page_boundary",
        "resident < max(target, 1)",
        "resident <= max(target, 1)",
        "test_page_boundary.py",
    ),
    _fault(
        "a prefill group is larger than b_moe",
        "admission",
        "tokens + rows > b_moe",
        "tokens > b_moe",
        "test_admission.py",
    ),
    _fault(
        "a group takes more sequences than there are request slots",
        "admission",
        " or len(unit.members) > slots",
        "",
        "test_admission.py",
    ),
    _fault(
        "followers come without their leader",
        "admission",
        "followers = tuple(s for s in members if s is not leader)",
        "followers = tuple(members)",
        "test_admission.py",
    ),
    _fault(
        "pages of a prompt that ends are never free again",
        "prefixes",
        "            if page.holders == 0:\n",
        "            if page.holders == -1:\n",
        "test_prefixes.py",
    ),
    _fault(
        "the account forgets what a release gives back",
        "page_ledger",
        "        self._sum -= pages\n",
        "",
        "test_page_ledger.py",
    ),
    _fault(
        "no room is kept for one sequence to outgrow its reservation",
        "page_ledger",
        "return self.total_pages - gap + max",
        "return self.total_pages + max",
        "test_growth.py",
    ),
    _fault(
        "prompts are admitted before sequences that wait for pages",
        "page_ledger",
        "return bool(self.stalled or self.away)",
        "return False",
        "test_growth.py",
    ),
    _fault(
        "two sequences borrow at once",
        "growth",
        "        if self._ledger.borrower is not None or not self.lacking:\n",
        "        if not self.lacking:\n",
        "test_growth.py",
    ),
    _fault(
        "sequences run beyond what they have reserved",
        "growth",
        "        self.lacking.append(sequence)\n        return False\n",
        "        return True\n",
        "test_growth.py",
    ),
    _fault(
        "a loan comes without the extension that made it possible",
        "growth",
        "            names.append(self._borrower)\n",
        "            pass\n",
        "test_growth.py",
    ),
    _fault(
        "prompts stay on a device that has no room",
        "exclusive",
        "for unit in units) <= capacity.device",
        "for unit in units) <= capacity.device + 9",
        "test_exclusive.py",
        "test_residency.py",
    ),
    _fault(
        "sequences leave for a store without room for them",
        "store_policies",
        "if state.returning and leave > kv.store_free:",
        "if False:",
        "test_store_policies.py",
    ),
    _fault(
        "a sub-batch of streamed KV is larger than half of the device",
        "decode_streaming",
        "part.num_pages + _takes(part, row) > half_pages",
        "part.num_pages > half_pages",
        "test_decode_streaming.py",
    ),
    _fault(
        "ranks agree on too few expert calls",
        "rank_agreement",
        "    running = max(header.running for header in headers)\n",
        "    running = min(header.running for header in headers)\n",
        "test_rank_agreement.py",
        "test_rank_schedules.py",
    ),
    _fault(
        "a sequence moves to a rank without pages for it",
        "arrival_room",
        "pages <= self.pages and stored",
        "stored",
        "test_rank_moves.py",
        "test_rank_schedules.py",
    ),
    _fault(
        "a suspended sequence may never run again",
        "coroutine",
        "    (Status.SUSPENDED, Event.COMBINE_DECODE): Status.RUNNING,\n",
        "",
        "test_coroutine.py",
        "test_residency.py",
    ),
    _fault(
        "the first in is not the first out",
        "order/fifo",
        "self._queued.values())",
        "reversed(self._queued.values()))",
        "order/test_orders.py",
        "test_sequence_queue.py",
    ),
)


def is_caught(fault: Fault) -> bool | None:
    """Return whether a test fails with the fault, or None if the line is not in the source."""
    with tempfile.TemporaryDirectory(prefix="seeded-fault-") as folder:
        package = Path(folder) / "sgl_batch"
        shutil.copytree(_ROOT / "python" / "sgl_batch", package)
        source = fault.source(package)
        text = source.read_text()
        if fault.old not in text:
            return None
        source.write_text(text.replace(fault.old, fault.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, fault.test_files())]
        environment = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(command, capture_output=True, text=True, cwd=_ROOT, env=environment, check=False)
        assert done.returncode in (0, 1), f"the tests do not run: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.returncode == 1


def main(numbers: list[int]) -> int:
    """Seed the faults of these numbers, or all, and return the exit code."""
    missed = 0
    for number, fault in enumerate(FAULTS, 1):
        if numbers and number not in numbers:
            continue
        began = time.monotonic()
        caught = is_caught(fault)
        verdict = {True: "caught", False: "NOT CAUGHT", None: "NOT THERE"}[caught]
        missed += caught is not True
        sys.stdout.write(f"{number:2} {verdict:10} {fault.what} ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main([int(argument) for argument in sys.argv[1:]]))
