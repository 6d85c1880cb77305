"""An instance without a process: it implements the pool's Protocol `Member` in memory."""

from __future__ import annotations

import asyncio
import json
from array import array

from sgl_batch.control_plane.instances.http_messages import Controlled
from sgl_batch.control_plane.instances.member import MemberLostError
from sgl_batch.control_plane.instances.messages import Answered, EngineDeath, EngineFacts, Reading, Report, Tokens
from sgl_batch.core.answers import EngineStats


class ScriptedMember:
    """Answers `rate` lines at each poll, or none; a body that contains a word of `poison` kills its engine."""

    node = "here"

    def __init__(self, name="a", *, incarnation=1, rate=1000, poison=(), kept=(), computing=()):
        self.name, self.incarnation, self.rate, self.poison = name, incarnation, rate, poison
        self.running = dict.fromkeys(computing)
        self.answers = [Answered(number, key, 200, f"req-{key}", b'{"kept":1}') for number, key in enumerate(kept, 1)]
        self.deaths, self.acknowledged, self.cancelled = [], [], []
        self.lots, self.served = [], []
        self.tokens = {}
        self.code = None
        self.is_lost = self.engine_is_down = False
        self.phase, self.state = "ready", None
        self.unreported, self.read_after_s = 0, 0
        self.controls = []
        self.refuses = {}
        self.version = "v0"
        self.calls = None

    def lose(self):
        self.is_lost = True

    def _check(self):
        if self.is_lost:
            raise MemberLostError("its node is gone")

    async def submit(self, lot):
        self._check()
        if self.engine_is_down:
            return False
        self.lots.append([one.body for one in lot.lines])
        self.running.update((one.key, one) for one in lot.lines)
        return True

    async def poll(self, poll):
        await asyncio.sleep(0.002)
        self._check()
        self.acknowledged += poll.acknowledged
        self.engine_is_down = False
        for word in self.poison:
            if any(one is not None and word in one.body for one in self.running.values()):
                self.die(self.code)
        for key in list(self.running)[: self.rate]:
            line = self.running.pop(key)
            self.served.append(key if line is None else line.body)
            body = b'{"by":"%s"}' % self.name.encode()
            self.answers.append(Answered(len(self.answers) + 1, key, 200, f"req-{self.name}-{key}", body))
        return Report(
            incarnation=self.incarnation,
            phase=self.phase,
            restarts=len(self.deaths),
            facts=EngineFacts(("tiny",)),
            answers=tuple(self.answers[poll.after_answer :]),
            deaths=tuple(self.deaths[poll.after_death :]),
            tokens=tuple(Tokens(key, 0, array("i", found).tobytes()) for key, found in self.tokens.items()),
            in_flight=len(self.running),
            stats=self._stats(),
        )

    def die(self, code=None):
        self.deaths.append(EngineDeath(len(self.deaths) + 1, "killed", code, tuple(self.running)))
        self.running.clear()
        self.engine_is_down = True

    async def take_back(self, count, among=()):
        self._check()
        keys = tuple(key for key in among if key in self.running)
        keys = keys or tuple(key for key in reversed(self.running) if key not in self.tokens)[:count]
        for key in keys:
            del self.running[key]
        return keys

    async def cancel(self, keys):
        self._check()
        self.cancelled += keys
        for key in keys:
            self.running.pop(key, None)

    async def known(self):
        self._check()
        return tuple(self.running)

    async def stats(self):
        self._check()
        await asyncio.sleep(self.read_after_s)
        return Reading(len(self.deaths), self._stats(self.unreported))

    def _stats(self, more=0):
        return EngineStats(
            counters={"output_tokens": len(self.answers) + more},
            sequences={"QUEUED": sum(key not in self.tokens for key in self.running)},
        )

    async def adopt(self, state):
        self._check()
        self.state = state

    async def control(self, control):
        """Answer 200, or with the status of the path in `refuses`; 0 stands for an engine that is not ready."""
        self._check()
        self.controls.append(control)
        status = self.refuses.get(control.request.target, 200)
        body = json.dumps({"success": status == 200, "message": f"{self.name} says {status}"}).encode()
        found = Controlled(status=status, content_type="application/json", body=body, weight_version=self.version)
        return found if status else Controlled(status=0, body=b"not ready")

    async def http(self, request):
        self._check()
        return await self.calls.begin(request)

    async def http_more(self, asked):
        self._check()
        return await self.calls.more(asked)

    async def http_end(self, call):
        self._check()
        self.calls.end(call)

    async def stop(self):
        self.lose()
