"""`sgl-batch trace`: prints the states that a sequence went through, from a file written with --trace-file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_batch.cli.run.options import UsageParser
from sgl_batch.core.replay import ReplayError, replay_trace
from sgl_batch.errors import ConfigError
from sgl_batch.managers.rank_callbacks import find_callback

_MOST_SHOWN = 10
_Kinds = dict[str, type | tuple[type, ...]]
# The fields by which lines of a trace are told from others (managers/trace.py).
_NUMBER = (int, float)
_OF_A_CHANGE: _Kinds = {"t": _NUMBER, "sequence": str, "from": str, "to": str, "why": str}
_OF_A_DECISION: _Kinds = {"engine": _NUMBER, "rank": _NUMBER, "version": int, "decision": str}

_DESCRIPTION = """\
Print each change of a sequence's state: when it happened, from which state to which, and why.

  sgl-batch run -i in.jsonl -o out.jsonl --model PATH --trace-file trace.jsonl
  sgl-batch trace trace.jsonl ID
  sgl-batch trace trace.jsonl --replay     # make every scheduling decision again, and compare the actions

ID is the "id" in the body of an answer in out.jsonl, or the beginning of one; with n > 1 it is the sequence of the
first choice. Without ID, the states of every sequence are listed, one sequence a line.
"""


def trace_command(argv: Sequence[str]) -> int:
    """Run the command. Return its exit code: 1 where the file or the sequence does not exist."""
    parser = UsageParser(
        prog="sgl-batch trace", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="file written with --trace-file")
    parser.add_argument(
        "sequence", nargs="?", default="", metavar="ID", help="id of a sequence, or the beginning of one"
    )
    parser.add_argument(
        "--replay", action="store_true", help="make the recorded decisions again; the exit code is 2 if one differs"
    )
    args = parser.parse_args(argv)
    try:
        events = _read(args.file)
        if args.replay:
            return _replay(events)
        chosen = _chosen(events, args.file, args.sequence)
    except (ConfigError, ReplayError) as error:
        sys.stderr.write(f"sgl-batch trace: error: {error}\n")
        return 1
    sys.stdout.write(_paths(chosen) if not args.sequence else _events(chosen))
    return 0


def _read(file: Path) -> list[dict[str, Any]]:
    """Return what a trace holds. An engine that was killed leaves half of a last line, which is left out with a note.

    Raises ConfigError for a file that is no trace.
    """
    if not file.is_file():
        raise ConfigError(f"{file} is not a file; run with --trace-file {file} first")
    try:
        *lines, rest = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    events = [_event(line, f"line {number:,} of {file}") for number, line in enumerate(lines, 1)]
    if rest and (last := _parsed(rest)) is not None:
        events.append(last)
    elif rest:
        sys.stderr.write(f"sgl-batch trace: the last line of {file} is not whole, and is left out\n")
    if not events:
        raise ConfigError(f"{file} holds no line of a trace; name a file written with --trace-file")
    return events


def _event(line: bytes, place: str) -> dict[str, Any]:
    event = _parsed(line)
    if event is None:
        raise ConfigError(f"{place} is not of a trace; name a file written with --trace-file")
    return event


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return what a whole line of a trace holds; None for any other line."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # a UnicodeDecodeError too
        return None
    if not isinstance(event, dict):
        return None
    kinds = _OF_A_DECISION if _is_decision(event) else _OF_A_CHANGE
    return event if all(isinstance(event.get(name), kind) for name, kind in kinds.items()) else None


def _is_decision(event: dict[str, Any]) -> bool:
    """Return whether an event is a decision, which may have a sequence too; others are changes of state."""
    return "decision" in event


def _chosen(events: list[dict[str, Any]], file: Path, name: str) -> list[dict[str, Any]]:
    """Return the changes of state of the sequences whose names begin with `name`. Raises ConfigError for none."""
    changes = [event for event in events if not _is_decision(event)]
    if not changes:
        raise ConfigError(f"{file} holds no sequence, but decisions; see --replay")
    chosen = [event for event in changes if event["sequence"].startswith(name)]
    if not chosen:
        held = len({event["sequence"] for event in changes})
        raise ConfigError(f"no sequence in {file} begins with {name!r}; it holds {held} sequences")
    return chosen


def _replay(events: list[dict[str, Any]]) -> int:
    """Make the decisions again. Return 2 if one differs. Raises ReplayError where they cannot be made."""
    number, differences = replay_trace(events, find_callback)
    for one in differences[:_MOST_SHOWN]:
        sys.stdout.write(f"decision {one.number}\n  recorded {one.recorded}\n  replayed {one.replayed}\n")
    sys.stdout.write(f"{number:,} decisions, {len(differences):,} differ\n")
    return 2 if differences else 0


def _paths(events: list[dict[str, str]]) -> str:
    paths: dict[str, list[str]] = {}
    for event in events:
        paths.setdefault(event["sequence"], [event["from"]]).append(event["to"])
    return "".join(f"{name}  {' > '.join(path)}\n" for name, path in paths.items())


def _events(events: list[dict[str, str]]) -> str:
    start = float(events[0]["t"])
    return "".join(
        f"{event['sequence'][:12]}  +{float(event['t']) - start:9.3f} s  {event['from']:>10} > {event['to']:<10}  "
        f"{event['why']}\n"
        for event in events
    )
