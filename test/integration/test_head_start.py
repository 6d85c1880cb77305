"""A Python program's engine runs in processes that its early fork server forks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny-qwen3-moe"
PROGRAM = """
import sys
import psutil
import sgl_batch

if __name__ == "__main__":
    Engine = sgl_batch.Engine
    early = {child.pid for child in psutil.Process().children()}
    engine = Engine(model_path=sys.argv[1], device="cpu", b_moe_decode=8)
    served = [psutil.Process(one.pid).ppid() for one in engine.own_processes]
    engine.shutdown()
    assert served and set(served) <= early, (served, early)
"""


def test_the_fork_server_that_began_with_the_import_serves_the_engine(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    done = subprocess.run([sys.executable, str(program), str(MODEL)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
