"""The AMX tiles keep their rules. On a processor without AMX its instructions are emulated one by one, as the manual
specifies them. Its speed, and whether a processor follows the manual, can be tested only on one with AMX.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from compiled_checks import HERE, KERNELS, compiled, run

REFUSED = 3
EMULATION = HERE / "amx_emulation.cpp"

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is part of x86-64")


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [
        KERNELS / f"{name}.cpp"
        for name in ("gemm_amx_bf16", "packing", "coded", "fp4", "int4", "fp8", "int8_groups", "group_scale", "rows")
    ]
    return compiled(tmp_path_factory.mktemp("amx"), "amx_tile_checks", EMULATION, *sources)


def test_a_tile_is_exact_alone_and_with_other_rows_and_stays_within_its_memory(checks):
    done = run(checks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout in ("emulation\n", "hardware\n")


def test_sums_of_int8_are_exact_for_any_rows_and_stay_within_their_memory(tmp_path):
    sources = [KERNELS / f"{name}.cpp" for name in ("gemm_amx_int8", "rows_int8_avx512")]
    done = run(compiled(tmp_path, "amx_int8_checks", EMULATION, *sources))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout in ("emulation\n", "hardware\n")


def test_products_in_int8_have_the_bits_of_the_kernel_for_any_machine(tmp_path):
    names = "gemm_amx_int8 gemm_int8_portable gemm_portable experts_int8 linear_int8 rows_int8 rows_int8_avx512".split()
    names += "packing_int8 expert_plan routing token_sums rows reserved_memory".split()
    sources = [KERNELS / f"{name}.cpp" for name in names]
    done = run(compiled(tmp_path, "amx_int8_driver_checks", EMULATION, *sources, flags=("-fopenmp",)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout in ("emulation\n", "hardware\n")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("17 rows", "configured too large"),
        ("reserved", "reserved bytes that are not zero"),
        ("unconfigured", "not configured"),
        ("left out", "leaves out"),
        ("after release", "not configured"),
        ("unlike rows", "do not fit"),
        ("read outside", "read outside"),
        ("written outside", "written outside"),
    ],
)
def test_the_emulation_refuses_what_the_instructions_do_not_allow(checks, rule, message):
    done = run(checks, rule)
    if done.stdout == "hardware\n":
        pytest.skip("this processor has AMX; nothing is emulated")
    assert done.returncode == REFUSED
    assert message in done.stderr
