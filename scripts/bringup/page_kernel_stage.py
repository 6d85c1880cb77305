"""Owns the stage that copies pages on the GPU in both ways, with the cases of their unit test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run each case by one kernel, and by a call for each page."""
    sys.path.append(str(ROOT / "test" / "unit" / "kv_offload"))
    import test_page_copies

    from sgl_batch.kv_offload.page_copies import FusedPageCopy, PerPageCopy

    for copies in (PerPageCopy, FusedPageCopy):
        for case in test_page_copies.CASES:
            print(copies.__name__, case, flush=True)
            test_page_copies.check(copies, *case, device=spec["device"])
    return {"remark": f"{2 * len(test_page_copies.CASES)} cases"}


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from bringup.stage_result import answer

    answer(run)
