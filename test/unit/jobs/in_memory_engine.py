"""An engine without a model, for tests of jobs and of the command; can be imported and run.

As a program it is `sgl-batch` with this engine: `python in_memory_engine.py run -i ... -o ... --model any`,
where the engine's own flags are those of `_parse_engine_argv`. Its answers depend on the request alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from sgl_batch.core.answers import EngineStats, LineResponse
from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.errors import ConfigError, EngineError
from sgl_batch.planner.refinement import PlanBasis
from sgl_batch.planner.schedule import Prediction
from sgl_batch.planner.workload import Workload

Before = Callable[[Mapping[str, object]], Awaitable[LineResponse | None]]


async def at_once(body: Mapping[str, object]) -> None:
    """Answer without waiting."""


class InMemoryEngine:
    """Implements LineEngine. `before` may wait, raise, or give another response than the usual one."""

    plan_rates = None

    def __init__(self, before: Before = at_once, served_model_names: tuple[str, ...] = ("tiny",)) -> None:
        self.served_model_names = served_model_names
        self.num_running = 0
        self.most_running = 0
        self.num_answered = 0
        self._before = before

    async def respond(
        self, url: str, body: Mapping[str, object], partial_output: PartialOutput | None = None
    ) -> LineResponse:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            other = await self._before(body)
        finally:
            self.num_running -= 1
        if other is not None:
            return other
        self.num_answered += 1
        return answer(url, body)

    def acknowledge(self, request_ids: Iterable[str]) -> None:
        """It keeps no answers."""

    async def stats(self) -> EngineStats:
        return EngineStats(
            counters={
                "expert_calls": 2 * self.num_answered,
                "expert_rows": 20 * self.num_answered,
                "expert_gemms": 4 * self.num_answered,
            },
            part_s={"attention": 1.0 * self.num_answered, "experts": 3.0 * self.num_answered},
            tokens_per_expert=[self.num_answered, 3 * self.num_answered],
        )


def answer(url: str, body: Mapping[str, object]) -> LineResponse:
    """Return an answer that depends only on the request and its seed."""
    text = sha256(json.dumps([url, body], sort_keys=True).encode()).hexdigest()
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    return LineResponse(
        status_code=200, request_id=f"req_{text[:8]}", body={"choices": [{"text": text}], "usage": usage}
    )


def refusal(message: str = "the prompt is too long", code: str = "context_length_exceeded") -> LineResponse:
    """Return a 400 in OpenAI's shape."""
    error = {"message": message, "type": "invalid_request_error", "param": "messages", "code": code}
    return LineResponse(status_code=400, request_id="req_refused", body={"error": error})


def request(custom_id: str, prompt: str = "hello", **body: object) -> dict[str, object]:
    """Return a good request line."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "tiny", "prompt": prompt, "max_tokens": 4, **body},
    }


class InMemoryBatchEngine:
    """The engine as a whole, as the command uses it."""

    def __init__(self, line_engine: InMemoryEngine, forward: tuple[str | None, str | None] = (None, None)) -> None:
        self._forward = forward
        self.loop = asyncio.new_event_loop()
        self.num_engines = 1
        self.is_shut_down = False
        self.prediction: Prediction | None = None
        self._line_engine = line_engine

    def line_engine(self) -> InMemoryEngine:
        return self._line_engine

    def plan_manifest(self) -> Mapping[str, object]:
        """With the mode that was asked for, that of an earlier start, or that which a self-check here would find."""
        wanted, earlier = self._forward
        if wanted not in (None, "auto", "measure"):
            choice = {"mode": wanted, "why": "asked for"}
        elif earlier is not None and (found := json.loads(earlier).get("decode_forward")):
            choice = {"mode": found["mode"], "why": "earlier"}
        else:
            choice = {"mode": "sglang", "why": "measured"}
        planned = {"source": "conservative defaults (in memory)", "chosen": {}}
        return {
            "b_attn_decode": 64,
            "planned": planned,
            "choices": {"decode_forward": choice, "overlap": {"mode": "off", "why": "x"}},
        }

    def predict(self, workload: Workload) -> Prediction | None:
        return self.prediction

    def plan_basis(self) -> PlanBasis | None:
        return None

    async def refine_plan(self, values: Mapping[str, object], why: str) -> None:
        raise AssertionError("nothing predicts another plan")

    def shutdown(self) -> None:
        self.is_shut_down = True
        self.loop.close()


def prepare_in_memory(
    engine_argv: Sequence[str], workload: Callable[[Path | None], Workload | None]
) -> Callable[[], InMemoryBatchEngine]:
    """Prepare the engine for the command. Flags make it misbehave on prompts that say so."""
    args = _parse_engine_argv(engine_argv)

    async def before(body: Mapping[str, object]) -> LineResponse | None:
        prompt = str(body.get("prompt"))
        if prompt == "refuse":
            return refusal()
        if prompt == "die":
            raise EngineError("the scheduler process ended with signal 9")
        if prompt == "kill" and not args.release:
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt == "hold" and not args.release:
            sys.stdout.write("holding\n")
            sys.stdout.flush()
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    if not args.stubborn:
                        raise
        return None

    return lambda: InMemoryBatchEngine(
        InMemoryEngine(before, (args.served_model_name or args.model_path,)), (args.decode_forward, args.start_choices)
    )


def _parse_engine_argv(engine_argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--model-path")
    parser.add_argument("--served-model-name")
    parser.add_argument("--log-level")
    parser.add_argument("--decode-forward")
    parser.add_argument("--start-choices")
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--release", action="store_true")
    args, unknown = parser.parse_known_args(engine_argv)
    if unknown:
        raise ConfigError(f"unrecognized arguments: {' '.join(unknown)}")
    return args


if __name__ == "__main__":
    from sgl_batch.cli.run.command import run_command

    sys.exit(run_command(sys.argv[2:], prepare_in_memory))
