"""Runs every family of the integration tests in every form of engine, against Hugging Face, and prints a table.

    python test/long/family_matrix.py [FAMILY ...]

Each family runs in a process of its own. Exit code 1 where tokens differ or an engine dies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(_ROOT / "test"), str(_ROOT / "scripts")]

from integration.greedy_proof import check_greedy, make_requests  # noqa: E402
from integration.test_families import MIXED, PAGE, SMALL, STORE, greedy  # noqa: E402
from integration.test_ranks import ranks  # noqa: E402
from sgl_batch import Engine  # noqa: E402
from sgl_batch.errors import SglBatchError  # noqa: E402
from tiny_models.random_checkpoints import HUB, TRANSFORMERS, make_checkpoint  # noqa: E402
from tiny_models.random_families import FAMILIES, RandomFamily  # noqa: E402

_CASES: dict[str, dict[str, Any]] = {
    "sub-batches": {},
    "whole groups": {"b_attn_prefill": 160, "b_attn_decode": 8},
    "single rows": {"b_attn_prefill": 1, "b_attn_decode": 1},
    "accumulate": {"accumulate": True},
    "no accumulate": {"accumulate": False},
    "no sharing": {"share_prefixes": False},
    "mixed": MIXED,
    "store": STORE,
    "store, KV streamed": {**STORE, "decode_kv": "streamed"},
    "store, mixed": {**STORE, **MIXED},
    "callback at yields": {"on_yield": "integration.yield_callbacks:write_what_was_read"},
    "2 ranks": ranks(2),
    "2 ranks, store": {**ranks(2), **STORE},
}
_EXPERT_CASES: dict[str, dict[str, Any]] = {
    "torch experts": {"expert_runner": "torch"},
    "streamed": {"weights": "streamed"},
    "streamed, store": {"weights": "streamed", **STORE},
    "2 ranks, streamed": {**ranks(2), "weights": "streamed"},
}
_FORM = f"config as {TRANSFORMERS} writes it"


def _cases(family: RandomFamily) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, form of the config and arguments of each engine."""
    yield _FORM, TRANSFORMERS, {}
    for name, arguments in {**_CASES, **(_EXPERT_CASES if family.experts else {})}.items():
        yield name, HUB, arguments


def _run(family: RandomFamily, form: str, arguments: dict[str, Any], directory: Path) -> str:
    """Run one engine and return `ok`, `refused: ...` or the fault."""
    requests = make_requests(PAGE)
    # Hugging Face's classes do not know every config in the hub's form.
    paths = {each: str(directory / f"{family.name}-{each}") for each in (form, TRANSFORMERS)}
    for each, path in paths.items():
        if not Path(path).exists():
            make_checkpoint(family, each, directory, _ROOT / "test" / "models" / "tiny-qwen3-moe")
    try:
        engine = Engine(model_path=paths[form], **{**SMALL, **arguments})
    except SglBatchError as error:
        return f"refused: {error}"
    try:
        outputs = greedy(engine, requests)
        if engine.running["forward"] != "coroutine":
            return "SGLang's own forward"
        check_greedy(paths[TRANSFORMERS], requests, outputs)
    except AssertionError as error:
        return str(error).splitlines()[0]
    finally:
        engine.shutdown()
    return "ok"


def _one_family(name: str) -> None:
    """Run all cases of a family and print a JSON line for each."""
    family = next(family for family in FAMILIES if family.name == name)
    with tempfile.TemporaryDirectory() as directory:
        for case, form, arguments in _cases(family):
            found = _run(family, form, arguments, Path(directory))
            sys.stdout.write(json.dumps([case, found]) + "\n")
            sys.stdout.flush()


def main(names: list[str]) -> int:
    """Run the families named, or all, and print the table."""
    failed = False
    known = [family.name for family in FAMILIES]
    if unknown := [name for name in names if name not in known]:
        sys.stderr.write(f"no family {', '.join(unknown)}; there are: {', '.join(known)}\n")
        return 1
    for family in FAMILIES:
        if names and family.name not in names:
            continue
        begun = time.monotonic()
        command = [sys.executable, __file__, "--one", family.name]
        path = os.pathsep.join([str(_ROOT / "test"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
        for case, _, _ in _cases(family):
            result = found.get(case, f"no result: the process ended with {done.returncode}")
            failed |= not result.startswith(("ok", "refused: "))
            sys.stdout.write(f"{family.name:16} | {case:34} | {result}\n")
        if len(found) < len(list(_cases(family))):
            sys.stdout.write(done.stderr[-2000:] + "\n")
        sys.stdout.write(f"{family.name:16} took {time.monotonic() - begun:.0f} s\n")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _one_family(sys.argv[2])
    else:
        sys.exit(main(sys.argv[1:]))
