"""Expert slots hold the bits of packing the plain matrices, in any order of requests, and kernels compute with them."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("sgl_batch_kernel.expert_loader")
from loader_cases import Loading, Packed, Stored
from sgl_batch_kernel import experts as run_experts

# Inputs and channels: whole panels, odd ones, less than a panel, more than one read (2 MiB), panels of several reads.
SIZES = ((64, 32), (100, 50), (34, 2), (1030, 1100), (33_000, 34))
FORMS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.int8),
    (torch.float32, torch.int8),
)


@pytest.mark.parametrize(("stored_dtype", "dtype"), FORMS, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize(("hidden", "inter"), SIZES)
def test_a_slot_holds_the_bits_of_packing_the_plain_matrices(
    hidden: int, inter: int, transposed: bool, stored_dtype: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    sizes = {"experts": 2, "inter": inter, "hidden": hidden}
    stored = Stored.random(tmp_path, **sizes, dtype=stored_dtype, seed=hidden, transposed=transposed)
    for direct in (True, False):
        loading = Loading.start(stored, slots=4, dtype=dtype, direct=direct)
        assert direct or not loading.loader.direct()
        loading.ask([2, 0], [0, 1], urgent=False)
        loading.wait(0, 2)
        assert loading.holds(2, 0)
        assert loading.holds(0, 1)
        assert loading.untouched(1), "a slot that was not asked for stays as it was"
        assert loading.untouched(3)
        size, experts, dropped, errors, *_ = loading.loader.totals()
        assert (size, experts, dropped, errors) == (2 * stored.expert_bytes, 2, 0, 0)
        loading.loader.close()


def test_rows_of_zeros_and_of_tiny_numbers_get_the_int8_values_of_resident_weights(tmp_path: Path) -> None:
    rows = torch.zeros(4, 70)
    rows[1, 3], rows[2, 5], rows[3, 7] = 1e-45, -1e-43, 3e38
    stored = Stored.random(tmp_path, experts=6, inter=48, hidden=70, dtype=torch.float32)
    file, offset = stored.file_offsets[2, 0].tolist()
    stored.w13[2, :4] = rows
    with open(stored.files[file], "r+b") as opened:
        opened.seek(offset)
        opened.write(stored.w13[2, :48].contiguous().numpy().tobytes())
    loading = Loading.start(stored, slots=1, dtype=torch.int8)
    loading.ask([0], [2])
    loading.wait(0)
    assert loading.holds(0, 2)


def test_invalid_calls_are_refused_and_change_nothing(tmp_path: Path) -> None:
    loading = Loading.start(Stored.random(tmp_path, experts=6, inter=48, hidden=70), slots=4)
    for slots, experts in (([-1], [0]), ([4], [0]), ([2, 1, 2], [0, 1, 2])):
        with pytest.raises(ValueError, match="slot"):
            loading.ask(slots, experts)
    for wrong in ([2, 0], [-1, 0], [0, -1]):
        file_offsets = loading.stored.file_offsets[:2].clone()
        file_offsets[1, 2] = torch.tensor(wrong)
        with pytest.raises(ValueError, match=r"byte -?\d+ of file -?\d+ of 2"):
            loading.loader.submit(torch.tensor([0, 1]), file_offsets, True)
    with pytest.raises(ValueError, match="places are"):
        loading.loader.submit(torch.tensor([0, 1]), loading.stored.file_offsets[:1], True)
    for slot in range(4):
        with pytest.raises(ValueError, match=f"slot {slot} is empty"):
            loading.wait(slot)
        assert loading.untouched(slot)
    for call in (loading.wait, loading.drop, loading.hurry):
        with pytest.raises(ValueError, match="slot 4 of 4"):
            call(4)
    assert loading.drop(0, 1) == [False, False], "a slot that was not asked for cannot be dropped"
    loading.loader.close()
    with pytest.raises(ValueError, match="closed"):
        loading.ask([0], [0])


def test_slots_of_the_wrong_type_or_size_are_refused(tmp_path: Path) -> None:
    stored = Stored.random(tmp_path, experts=6, inter=48, hidden=70)
    with pytest.raises(ValueError, match="0 threads"):
        Loading.start(stored, slots=2, threads=0)
    with pytest.raises(ValueError, match="another number type"):
        Loading.start(stored, slots=2, dtype=torch.float32)
    odd = Stored.random(tmp_path, experts=2, inter=5, hidden=8)
    with pytest.raises(ValueError, match="even numbers"):
        Loading.start(odd, slots=2, dtype=torch.int8)


class LoaderDriver:
    """Random calls from one thread on slots of its own; after each wait the bits of the slot are checked."""

    def __init__(self, loading: Loading, slots: range, seed: str) -> None:
        self.loading, self.slots, self.rng = loading, slots, random.Random(seed)
        self.pending: dict[int, int] = {}
        self.checked, self.faults = 0, list[str]()

    def run(self, until: float) -> None:
        try:
            while time.monotonic() < until:
                self.rng.choice((self.ask, self.ask, self.wait, self.drop, self.hurry))()
            self.wait(len(self.pending))
        except Exception as error:  # noqa: BLE001 (reported by the test, which waits for this thread)
            self.faults.append(repr(error))

    def ask(self) -> None:
        free = [slot for slot in self.slots if slot not in self.pending]
        slots = self.rng.sample(free, self.rng.randint(0, len(free)))
        experts = [self.rng.randrange(len(self.loading.stored.w2)) for _ in slots]
        if slots:
            self.loading.ask(slots, experts, urgent=self.rng.random() < 0.5)
        self.pending.update(zip(slots, experts, strict=True))

    def wait(self, number: int | None = None) -> None:
        slots = self.rng.sample(
            list(self.pending), self.rng.randint(0, len(self.pending)) if number is None else number
        )
        self.loading.wait(*slots)
        for slot in slots:
            expert = self.pending.pop(slot)
            self.checked += 1
            if not self.loading.holds(slot, expert):
                self.faults.append(f"slot {slot} does not hold expert {expert}")

    def drop(self) -> None:
        slots = self.rng.sample(list(self.pending), self.rng.randint(0, len(self.pending)))
        for slot, dropped in zip(slots, self.loading.drop(*slots), strict=True):
            if dropped:
                del self.pending[slot]

    def hurry(self) -> None:
        self.loading.hurry(*self.rng.sample(list(self.slots), 3))


def test_random_calls_of_several_threads_fill_every_slot_with_the_expert_asked_for(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    stored = Stored.random(tmp_path, experts=24, inter=90, hidden=130)
    loading = Loading.start(stored, slots=24, dtype=torch.int8, threads=4)
    until = time.monotonic() + 2.0
    drivers = [LoaderDriver(loading, range(8 * part, 8 * part + 8), f"{seed} {part}") for part in range(3)]
    threads = [threading.Thread(target=driver.run, args=(until,)) for driver in drivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [driver.faults for driver in drivers] == [[], [], []], f"seed {seed}"
    size, experts, dropped, errors, *_ = loading.loader.totals()
    assert all(driver.checked > 20 for driver in drivers), f"seed {seed}"
    assert experts == sum(driver.checked for driver in drivers), (
        f"seed {seed}: each is loaded once, and {dropped} were dropped"
    )
    assert (size, errors) == (experts * stored.expert_bytes, 0), f"seed {seed}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_experts_in_any_slots_compute_the_bits_of_resident_experts(dtype: torch.dtype, tmp_path: Path) -> None:
    number, slots = 9, 13
    stored = Stored.random(tmp_path, experts=number, inter=50, hidden=68, dtype=torch.float32)
    if dtype == torch.bfloat16:
        stored = Stored.random(tmp_path, experts=number, inter=50, hidden=68)
    resident = Packed.of(stored, dtype)
    where = torch.randperm(slots)[:number].to(torch.int32)
    where[4] = -1
    held = Packed.empty(slots, stored, dtype)
    for expert, slot in enumerate(where.tolist()):
        if slot >= 0:
            for to, of in zip(held.slot(slot), resident.slot(expert), strict=True):
                to.copy_(of)
    x = torch.randn(40, 68).to(stored.w13.dtype)
    ids = torch.stack([torch.randperm(number)[:3] for _ in range(40)]).to(torch.int32)
    ids[ids == 4] = -1
    weights = torch.rand(40, 3)

    def computed(packed: Packed, **where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = {"w13_scales": packed.w13_scales, "w2_scales": packed.w2_scales}
        return run_experts(x, packed.w13, packed.w2, weights, ids, **scales, **where)

    for found, expected in zip(computed(held, slots=where), computed(resident), strict=True):
        assert torch.equal(found, expected)
    ids[7, 0] = 4
    with pytest.raises(ValueError, match="expert 4 has 1 rows and no slot"):
        computed(held, slots=where)
    where[4] = slots
    with pytest.raises(RuntimeError, match=f"expert 4 lies in slot {slots} of {slots}"):
        computed(held, slots=where)
    with pytest.raises(RuntimeError, match="use int32"):
        computed(held, slots=where.long())
