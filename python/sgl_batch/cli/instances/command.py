"""Runs `sgl-batch instances`: lists, adds, drains and removes the engines of a server."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from sgl_batch.api.instances import INSTANCES_PATH
from sgl_batch.api.key_sources import VARIABLES, key_of
from sgl_batch.cli.instances.table import table
from sgl_batch.cli.jobs.options import DEFAULT_BASE_URL
from sgl_batch.cli.run.options import UsageParser
from sgl_batch.errors import ConfigError, SglBatchError

_COMMANDS = {
    "list": "print the instances, where they are, what they do and how fast they are",
    "add": "start one more instance, where a node has room",
    "drain": "let an instance answer the lines that it has, and give it no more",
    "remove": "let an instance answer the lines that it has, then end it",
}
_EPILOG = f"""\
example:
  sgl-batch serve --model-path ./my-moe --instances auto --ray-address HEAD:6379 --admin-api-key-file admin-key
  sgl-batch instances list --admin-api-key-file admin-key
  sgl-batch instances remove i2 --wait --admin-api-key-file admin-key

The server: --base-url, else OPENAI_BASE_URL, else {DEFAULT_BASE_URL}. The key is the one that controls the engine:
--admin-api-key-file, --admin-api-key, else {VARIABLES["admin_api_key"]}.

exit codes: 0 done, 1 bad usage or a refusal of the server, 3 the server cannot be reached, 130 stopped by Ctrl-C
"""
_TIMEOUT_S = 30.0
_LOOK_EVERY_S = 0.5


class _RefusedError(SglBatchError):
    """The server refused a request."""


def instances_command(argv: Sequence[str]) -> int:
    """Run the command. Return its exit code."""
    try:
        args = _parser().parse_args(argv)
        key = key_of("admin_api_key", args, os.environ)
        return _run(args, _Client(args.base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE_URL, key))
    except (ConfigError, _RefusedError) as error:
        return _complain(str(error), 1)
    except SglBatchError as error:
        return _complain(str(error), 3)
    except KeyboardInterrupt:
        return _complain("interrupted; what was asked of the server goes on", 130)


def _complain(message: str, exit_code: int) -> int:
    sys.stderr.write(f"sgl-batch instances: error: {message}\n")
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = UsageParser(
        prog="sgl-batch instances",
        description="Show and change the instances of a server that was started with --instances.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        if name in ("drain", "remove"):
            command.add_argument("name", metavar="NAME", help="the instance, as `list` names it")
            command.add_argument("--wait", action="store_true", help="wait until it is empty, or has ended")
        if name == "list":
            command.add_argument("--json", action="store_true", help="print JSON")
        server = command.add_argument_group("server")
        server.add_argument("--base-url", metavar="URL", help="the server's address")
        server.add_argument("--admin-api-key", metavar="KEY", help="the key that controls the engine")
        server.add_argument("--admin-api-key-file", metavar="FILE", help="file with that key")
    return parser


def _run(args: argparse.Namespace, client: _Client) -> int:
    if args.command == "list":
        rows = client.rows()
        sys.stdout.write((json.dumps(rows, indent=2) if args.json else table(rows)) + "\n")
        return 0
    if args.command == "add":
        row = client.ask("POST", "")
    elif args.command == "drain":
        row = client.ask("POST", f"/{quote(args.name, safe='')}/drain")
    else:
        row = client.ask("DELETE", f"/{quote(args.name, safe='')}")
    while getattr(args, "wait", False) and not _is_done(args.command, args.name, rows := client.rows()):
        row = next(one for one in rows if one["name"] == args.name)
        time.sleep(_LOOK_EVERY_S)
    sys.stdout.write(f"{row['name']}\n")
    return 0


def _is_done(command: str, name: str, rows: list[dict[str, Any]]) -> bool:
    row = next((one for one in rows if one["name"] == name), None)
    return row is None or (command == "drain" and row["phase"] == "drained")


class _Client:
    def __init__(self, base_url: str, key: str | None) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", "")["data"]
        return found

    def ask(self, method: str, path: str) -> dict[str, Any]:
        """Return the answer of the server. Raises _RefusedError, or SglBatchError where there is none."""
        import httpx

        try:
            answer = httpx.request(
                method, self._base_url + INSTANCES_PATH + path, headers=self._headers, timeout=_TIMEOUT_S
            )
            body = answer.json()
            if answer.status_code == 200 and isinstance(body, dict):
                return body
            said = body["error"]["message"]
        except httpx.HTTPError as error:
            raise SglBatchError(f"the server {self._base_url} cannot be reached: {error}; see --base-url") from error
        except (ValueError, KeyError, TypeError) as error:
            raise _RefusedError(
                f"the server {self._base_url} has no instances: it answered with status {answer.status_code}"
            ) from error
        if answer.status_code >= 500:
            raise SglBatchError(f"the server {self._base_url} answered with {answer.status_code}: {said}")
        raise _RefusedError(f"{said}")
