"""A faulty import that only a CUDA machine runs is found on a CPU, with its module and error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MODULES = {
    "__init__.py": "",
    "on_cpu.py": "import torch\nif not torch.cuda.is_available():\n    from torch import no_such_name\n",
    "kernels.py": "from sgl_kernel.scalar_type import scalar_types\nTYPES = [scalar_types.uint4b8]\n",
    "missing_name.py": "import torch\nif torch.cuda.device_count() == 1:\n    from torch import no_such_name\n",
    "late.py": "def load():\n    from on_cuda.kernels import no_such_kernel\n",
    "stops.py": "import torch\nif torch.version.cuda:\n    raise SystemExit(5)\n",
}


def test_a_name_that_is_missing_on_the_cuda_branch_is_found(tmp_path: Path, repo_root: Path) -> None:
    (tmp_path / "on_cuda").mkdir()
    for name, source in MODULES.items():
        (tmp_path / "on_cuda" / name).write_text(source)
    command = [sys.executable, str(repo_root / "scripts" / "check_cuda_imports"), "on_cuda"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    *found, summary = done.stdout.splitlines()
    assert [line.partition(": ")[0] for line in found] == ["on_cuda.late", "on_cuda.missing_name", "on_cuda.stops"]
    assert "ImportError: cannot import name 'no_such_kernel' from 'on_cuda.kernels'" in found[0]
    assert found[0].endswith(", inside a function")
    assert "ImportError: cannot import name 'no_such_name' from 'torch'" in found[1]
    assert summary.startswith("3 of 6 modules")
    assert done.returncode == 1, done.stderr
