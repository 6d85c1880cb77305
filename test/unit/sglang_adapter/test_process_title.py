"""The title of a process can be set after its environment has changed."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os, sys
import setproctitle
from sgl_batch.sglang_adapter.child_processes import environment

first = next(iter(os.environ))
assert first == "A_FIRST"
with environment({first: "changed" * 10}):
    setproctitle.setproctitle("sglang::scheduler")
    print(open("/proc/self/cmdline").read().rstrip(chr(0)))
"""


def test_a_title_is_set_after_the_first_variable_has_changed():
    variables = {"A_FIRST": "1", **{name: value for name, value in os.environ.items() if name != "A_FIRST"}}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("sglang::scheduler", "")
