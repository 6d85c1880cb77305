"""Owns a program that starts one engine and reports the times up to its first token."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from runners.sglang_engines import start

    name, model = sys.argv[1:]
    arguments = {} if name == "stock" else {"log_startup": True}
    runner = start({"engine": name, "model": model, "dtype": "auto", "arguments": arguments})
    print("ready", flush=True)
    runner.generate([[1, 2, 3]], [1])
    print("first token", flush=True)
