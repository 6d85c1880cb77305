"""Loads experts of the folder argv[2] with the library argv[1] preloaded; prints the results of all cases as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loader_cases import Loading, Stored

SWITCHES = ("most", "fail_from", "no_direct_open", "no_direct_read", "closed", "interrupt", "calls", "waiting")
CASES: dict[str, Callable[[Any, Stored], Any]] = {}


def case(name: str) -> Callable[[Callable[[Any, Stored], Any]], Any]:
    def add(run: Callable[[Any, Stored], Any]) -> Any:
        CASES[name] = run
        return run

    return add


class Shim:
    """The switches of the preloaded library."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)

    def _switch(self, name: str) -> ctypes.c_int:
        return ctypes.c_int.in_dll(self._library, f"shim_{name}")

    def set(self, **switches: int) -> None:
        """Set these switches, and all others to 0."""
        for name in SWITCHES:
            self._switch(name).value = switches.get(name, 0)

    def open_gate(self) -> None:
        self._switch("closed").value = 0

    def await_reader(self) -> None:
        """Wait until a read waits at the closed gate."""
        while not self._switch("waiting").value:
            time.sleep(0.001)

    def read_offsets(self) -> list[int]:
        order = (ctypes.c_long * 64).in_dll(self._library, "shim_order")
        return list(order)[: self._switch("calls").value]


def load_all(shim: Shim, stored: Stored, **switches: int) -> dict[str, bool]:
    shim.set(**switches)
    loading = Loading.start(stored, slots=6, threads=3)
    loading.ask(range(6), range(6))
    loading.wait(*range(6))
    found = {"holds": all(loading.holds(slot, slot) for slot in range(6)), "direct": loading.loader.direct()}
    loading.loader.close()
    return found


for name, switches in {
    "5000 bytes at once": {"most": 5000},
    "1000 bytes at once": {"most": 1000},
    "interrupted": {"interrupt": 1},
    "no direct open": {"no_direct_open": 1},
    "no direct read": {"no_direct_read": 1},
}.items():
    case(name)(lambda shim, stored, switches=switches: load_all(shim, stored, **switches))


@case("direct here")
def direct_here(shim: Shim, stored: Stored) -> bool:
    shim.set()
    try:
        os.close(os.open(stored.files[0], os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def experts_of(stored: Stored, offsets: list[int]) -> list[int]:
    """Return the experts of these read offsets of buffered files, in the order of the first read of each."""
    owner = {int(one[1]): expert for expert in range(len(stored.file_offsets)) for one in stored.file_offsets[expert]}
    return list(dict.fromkeys(owner[offset] for offset in offsets))


@case("order")
def order(shim: Shim, stored: Stored) -> dict[str, Any]:
    shim.set(closed=1)
    loading = Loading.start(stored, slots=8, threads=1, direct=False)
    loading.ask([0], [0], urgent=False)
    shim.await_reader()
    begun = experts_of(stored, shim.read_offsets())
    loading.ask([1, 2, 4, 5], [1, 2, 4, 5], urgent=False)
    loading.ask([6], [6], urgent=True)
    try:
        loading.ask([3, 1], [3, 3], urgent=True)
        refused = ""
    except ValueError as error:
        refused = str(error).splitlines()[0]
    loading.hurry(4)
    dropped = loading.drop(0, 2, 3)
    shim.open_gate()
    loading.wait(0, 1, 4, 5, 6)
    holds = all(loading.holds(slot, slot) for slot in (0, 1, 4, 5, 6))
    holds = holds and loading.untouched(2) and loading.untouched(3)
    read = experts_of(stored, shim.read_offsets())
    loading.loader.close()
    return {"begun": begun, "refused": refused, "dropped": dropped, "read": read, "holds": holds}


@case("error")
def error(shim: Shim, stored: Stored) -> dict[str, Any]:
    shim.set(fail_from=7)
    loading = Loading.start(stored, slots=8, threads=1)
    loading.ask(range(8), range(8))
    messages = ""
    for slot in range(8):
        try:
            loading.wait(slot)
        except RuntimeError as fault:
            messages += str(fault).splitlines()[0] + "\n"
    errors = loading.loader.totals()[3]
    shim.set()
    loading.ask(range(8), range(8))
    loading.wait(*range(8))
    holds_later = all(loading.holds(slot, slot) for slot in range(8))
    loading.loader.close()
    return {"messages": messages, "errors": errors, "holds_later": holds_later}


@case("close")
def close(shim: Shim, stored: Stored) -> dict[str, Any]:
    shim.set(closed=1)
    loading = Loading.start(stored, slots=2, threads=1, direct=False)
    loading.ask([0, 1], [0, 1])
    shim.await_reader()
    ended = threading.Event()

    def end() -> None:
        loading.loader.close()
        ended.set()

    threading.Thread(target=end).start()
    message = ""
    try:
        loading.wait(1)
    except ValueError as fault:
        message = str(fault).splitlines()[0]
    early = ended.is_set()
    shim.open_gate()
    ended.wait(60)
    return {"ended_before_the_read": early, "message": message, "reads": len(shim.read_offsets())}


def main() -> None:
    shim, folder = Shim(sys.argv[1]), Path(sys.argv[2])
    stored = Stored.random(folder, experts=8, inter=48, hidden=70)
    sys.stdout.write(json.dumps({name: run(shim, stored) for name, run in CASES.items()}))


if __name__ == "__main__":
    main()
