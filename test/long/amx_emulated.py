#!/usr/bin/env python
"""Owns the proof that every native kernel keeps its rules by AMX tiles, on a processor with AVX512-BF16 and no AMX.

It builds the kernels with the emulation of the unit tests (test/unit/kernels/amx_emulation.h) in a temporary directory,
and runs every case that the unit tests run on the instruction sets of a machine: the very tiles and drivers, each AMX
instruction done in software. It fails (exit code 1) unless all of them hold. Of speed it says nothing.

pytest does not collect this file: it takes some four minutes on two cores. With arguments it runs that program instead,
with those kernels: `test/long/amx_emulated.py pytest test/integration/test_int8_activations.py`. Products of float32
use no tiles.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS, CHECKS = ROOT / "sgl-kernel", ROOT / "test" / "unit" / "kernels"
FLAG = "-DSGL_BATCH_EMULATED_AMX"


# SGLang's processes and pytest let an illegal instruction end a process with a trace: AMX's would never be emulated.
WITHOUT_TRACES = "import faulthandler\n\nfaulthandler.enable = lambda *_, **__: None\n"


def build(room: Path) -> Path:
    """Return the directory, inside `room`, from which Python imports the emulated kernels."""
    source, target = room / "source", room / "built"
    shutil.copytree(KERNELS, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    for name in ("amx_emulation.cpp", "amx_emulation.h"):
        shutil.copy(CHECKS / name, source / "csrc" / "cpu")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run(
        [*pip, "--target", str(target), str(source)], env={**os.environ, "SGL_BATCH_KERNEL_FLAGS": FLAG}, check=True
    )
    (target / "sitecustomize.py").write_text(WITHOUT_TRACES, encoding="utf-8")
    return target


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(program: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="sgl-batch-amx-") as room:
        say("building the kernels with emulated AMX")
        built = build(Path(room))
        path = os.pathsep.join(filter(None, (str(built), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "SGL_BATCH_ISA": "amx_bf16", "OMP_WAIT_POLICY": "PASSIVE"}
        if program:
            return subprocess.run([sys.executable, "-m", *program], env=environment, cwd=ROOT, check=False).returncode
        say("running every case")
        cases = [sys.executable, str(CHECKS / "kernel_cases.py")]
        done = subprocess.run(cases, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return 1
    report = json.loads(done.stdout)
    for failure in report["failures"]:
        say(f"does not hold: {failure}")
    say(f"{report['isa']}: {report['checked']} cases, {len(report['failures'])} do not hold")
    return 1 if report["failures"] or report["isa"] != "amx_bf16" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
