"""Owns the lines of the harness's jobs, and the comparison of what jobs give with an undisturbed run."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from typing import Any

URL = "/v1/chat/completions"


def request_lines(number: int, dice: random.Random) -> list[dict[str, Any]]:
    """Make greedy and seeded lines of many lengths, and some that the endpoint refuses."""
    lines = []
    for index in range(number):
        content = " ".join(str(dice.randrange(1000)) for _ in range(dice.randrange(1, 40)))
        body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        body |= {"max_tokens": dice.randrange(10, 150), "ignore_eos": True, "temperature": 0}
        if index % 3 == 1:
            body |= {"temperature": 0.8, "seed": dice.randrange(1 << 31)}
        if index % 50 == 49:
            body |= {"temperature": -1.0}
        lines.append({"custom_id": f"line-{index}", "method": "POST", "url": URL, "body": body})
    return lines


def essence(record: dict[str, Any]) -> str:
    """Return a result line without ids and times."""
    response = record["response"]
    body = None if response is None else {k: v for k, v in response["body"].items() if k not in ("id", "created")}
    if body is not None and isinstance(body.get("metadata"), dict):
        body["metadata"] = {k: v for k, v in body["metadata"].items() if "time" not in k and "id" not in k}
    status = None if response is None else response["status_code"]
    return json.dumps([status, body, record["error"]], sort_keys=True)


class Findings:
    """The checks and failures of several threads."""

    def __init__(self) -> None:
        self.jobs: Counter[str] = Counter()
        self.lines = 0
        self.crashed = self.twice = self.lost = self.different = 0
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def check(self, name: str, kind: str, ids: list[str], wanted: dict[str, str], records: list[Any]) -> None:
        """Compare the output and errors of one job with the undisturbed run's."""
        seen = Counter(str(record["custom_id"]) for record in records)
        twice = [f"{one}: {number} lines" for one, number in seen.items() if number > 1]
        lost = [f"{one}: no line" for one in ids if one not in seen]
        different, crashed = [], 0
        for record in records:
            if '"engine_crashed"' in json.dumps(record):
                crashed += 1
            elif essence(record) != wanted.get(record["custom_id"]):
                different.append(
                    f"{record['custom_id']}: {essence(record)} instead of {wanted.get(record['custom_id'])}"
                )
        with self._lock:
            self.jobs[kind] += 1
            self.lines += len(records)
            self.crashed += crashed
            self.twice += len(twice)
            self.lost += len(lost)
            self.different += len(different)
            self.faults += [f"{name}: {fault}" for fault in (*twice, *lost, *different)]

    def report(self, wall_s: float) -> None:
        """Print what the jobs gave, and the failures."""
        jobs = ", ".join(f"{number} {kind}" for kind, number in sorted(self.jobs.items()))
        print(f"\njobs: {jobs}; lines compared: {self.lines:,}; in {wall_s:.0f} s")
        print(f"lines twice: {self.twice}; lines lost: {self.lost}; other bodies than undisturbed: {self.different}")
        print(f"lines that were alone in the engine at two kills (engine_crashed): {self.crashed}")
        print(f"faults: {len(self.faults)}")
        for fault in self.faults[:20]:
            print(f"  {fault[:600]}")
