"""Runs `sgl-batch models`: prints the table of models and number formats, which is core/supported_models.py."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from sgl_batch.cli.models.tables import as_json, as_markdown, as_text
from sgl_batch.cli.run.options import UsageParser

_DESCRIPTION = """\
List the supported families of models and number formats: which forward pass computes each, and whether it runs on a
CPU and on a GPU. Nothing is loaded. `sgl-batch check --model DIR` checks one model, and the memory that it takes.
"""


def models_command(argv: Sequence[str]) -> int:
    """Run the command. Return its exit code."""
    parser = UsageParser(
        prog="sgl-batch models", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print the page docs/models.md")
    args = parser.parse_args(argv)
    if args.json:
        sys.stdout.write(json.dumps(as_json(), indent=2) + "\n")
    else:
        sys.stdout.write(as_markdown() if args.markdown else as_text())
    return 0
