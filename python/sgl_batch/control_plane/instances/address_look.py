"""Looks whether a Ray cluster can be joined, before Ray tries: its own attempts take up to a minute, and may never end.

It runs as a program of its own, `python -m sgl_batch.control_plane.instances.address_look ADDRESS`, which is killed
after some seconds.
"""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import sys

from sgl_batch.errors import ConfigError

RAY_VERSION = "2.60.0"
_CONNECTED_WITHIN_S, _WITHIN_S = 10.0, 30.0  # Ray's import alone takes many seconds on a busy machine
_TOKEN = "InvalidAuthToken"
_REMEDY = "start one with `ray start --head`, and check the address and the firewall"


def check_address(address: str, *, within_s: float = _WITHIN_S) -> None:
    """Raise ConfigError where no cluster answers at HOST:PORT, or this process cannot join it."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536) or "//" in address:
        raise ConfigError(
            f"--ray-address is {address}; it must be HOST:PORT, as `ray start --head` prints it (Ray's own port, not "
            "that of its dashboard or of ray://)"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=min(within_s, _CONNECTED_WITHIN_S)).close()
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at --ray-address {address}: {error}; {_REMEDY}") from None
    program = [sys.executable, "-m", __spec__.name if __spec__ else __name__, address]
    try:
        run = subprocess.run(program, capture_output=True, text=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"no Ray cluster answers at --ray-address {address} within {within_s:g} s; {_REMEDY}"
        ) from None
    check_found(address, run.stdout, run.stderr)


def check_found(address: str, said: str, errors: str) -> None:
    """Raise ConfigError where the program has not found a cluster that fits. `said` and `errors` are its output."""
    if _TOKEN in said + errors:
        raise ConfigError(
            f"the Ray cluster at --ray-address {address} refuses this process's token: set RAY_AUTH_TOKEN_PATH to the "
            "file that the cluster's nodes use (docs/ray.md)"
        )
    try:
        found = json.loads(said)
    except ValueError:
        last = (said + errors).strip().splitlines()[-1:] or ["it said nothing"]
        raise ConfigError(f"no Ray cluster answers at --ray-address {address}: {last[0]}") from None
    here = {"ray_version": RAY_VERSION, "python_version": platform.python_version()}
    names = {"ray_version": "Ray", "python_version": "Python"}
    for key, wanted in here.items():
        if found[key] != wanted:
            raise ConfigError(
                f"the Ray cluster at --ray-address {address} has {names[key]} {found[key]}, and this process has "
                f"{wanted}; install the same on all nodes"
            )
    if not found["has_node_here"]:
        raise ConfigError(
            f"this machine is no node of the Ray cluster at --ray-address {address}: let it join with `ray start "
            f"--address={address} --num-cpus=0` (with cores, if instances may run here)"
        )


def main() -> int:
    """Print what the cluster says of itself, as JSON."""
    from ray._private.services import find_node_ids
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # not in its stub

    client = GcsClient(address=sys.argv[1])
    found = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", b"cluster", timeout=5))
    theirs = {one.hex() for one in client.get_all_node_info(timeout=5)}
    found["has_node_here"] = bool(theirs & set(find_node_ids()))
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
