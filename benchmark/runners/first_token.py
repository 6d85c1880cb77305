"""Owns one engine from its start to its first token, as a program that says when it has come so far."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from runners.sglang_engines import start

    name, model = sys.argv[1:]
    runner = start({"engine": name, "model": model, "dtype": "auto", "arguments": {}})
    print("ready", flush=True)
    runner.generate([[1, 2, 3]], [1])
    print("first token", flush=True)
