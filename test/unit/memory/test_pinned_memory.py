"""Host memory is pinned in logged steps of whole units, and unpinned if a step fails."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

from sgl_batch.errors import ConfigError
from sgl_batch.memory import pinned_memory
from sgl_batch.memory.pinned_memory import pin, unpin

UNIT = 3 * 4096
MEMORY = torch.zeros(10 * UNIT, dtype=torch.uint8)


class Driver:
    """Keeps what is pinned, as offset and size. Refuses from byte `most` on."""

    def __init__(self, most: int = 1 << 60) -> None:
        self.pinned: list[tuple[int, int]] = []
        self._most = most

    def register(self, address: int, size: int) -> int:
        if sum(size for _, size in self.pinned) + size > self._most:
            return 2
        self.pinned.append((address - MEMORY.data_ptr(), size))
        return 0

    def unregister(self, address: int, size: int) -> int:
        self.pinned.remove((address - MEMORY.data_ptr(), size))
        return 0


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "_STEP_BYTES", 4 * UNIT + 5)


def test_large_memory_is_pinned_in_logged_steps_of_whole_units(caplog: pytest.LogCaptureFixture) -> None:
    driver, seconds = Driver(), itertools.count(100, 2)
    with caplog.at_level(logging.INFO):
        pin(MEMORY, "the store", "", unit_bytes=UNIT, register=driver.register, now=lambda: float(next(seconds)))
    assert driver.pinned == [(0, 4 * UNIT), (4 * UNIT, 4 * UNIT), (8 * UNIT, 2 * UNIT)]
    assert [record.getMessage().split(", ")[-1] for record in caplog.records] == ["3 s left", "1 s left", "0 s left"]
    assert all(record.getMessage().startswith("the store: ") for record in caplog.records)
    unpin(MEMORY, unit_bytes=UNIT, unregister=driver.unregister)
    assert driver.pinned == []


def test_a_failed_step_says_how_much_was_pinned_and_unpins_it() -> None:
    driver = Driver(most=8 * UNIT)
    with pytest.raises(ConfigError, match="the GPU's driver") as refused:
        pin(
            *(MEMORY, "the store", "name a smaller one"),
            **{"unit_bytes": UNIT, "register": driver.register, "unregister": driver.unregister},
        )
    assert str(refused.value) == (
        f"the GPU's driver has pinned {8 * UNIT} of {10 * UNIT} bytes of the store and no more (CUDA error 2); lift "
        "the limit on locked memory (ulimit -l), or name a smaller one"
    )
    assert driver.pinned == []


def test_memory_without_units_is_pinned_at_once() -> None:
    driver = Driver()
    pin(MEMORY, "experts", "", register=driver.register)
    assert driver.pinned == [(0, MEMORY.nbytes)]
