"""Compares passes that sets of ranks share with unshared ones: all tiny models, number types and ways of sets.

    python test/long/partitioned_passes.py

Exit code 1 where a bit differs. It takes some minutes on 2 cores.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(_ROOT / "test")]

from integration.conftest import FAMILIES  # noqa: E402
from integration.test_partitioned_passes import SMALL, faults, run_works  # noqa: E402

_SETS = ([[0, 1]], [[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1, 2, 3]])
_FORMS = (("float32", {}), ("bfloat16", {}), ("bfloat16", {"cpu_weight_dtype": "int8"}))
_WAYS: tuple[dict[str, Any], ...] = ({}, {**SMALL, "token_dispatcher": "gloo"})


def main() -> int:
    """Run all works; print what differs and return the exit code."""
    works = [
        {"model": str(_ROOT / "test" / "models" / family), "dtype": dtype, "flags": {**flags, **way}, "sets": sets}
        for family, (dtype, flags), way, sets in itertools.product(FAMILIES, _FORMS, _WAYS, _SETS)
    ]
    with tempfile.TemporaryDirectory(prefix="partitioned-") as directory:
        found = run_works(works, Path(directory))
    wrong = [
        f"{Path(one['model']).name} {one['dtype']} {one['flags']}: {fault}" for one in found for fault in faults(one)
    ]
    sys.stdout.write(("\n".join(wrong) or f"{len(works)} works on {len(found)} ranks: no bit differs") + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
