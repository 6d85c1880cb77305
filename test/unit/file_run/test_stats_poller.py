"""Reading counters from an engine that may be slow to answer."""

from __future__ import annotations

import asyncio

import pytest

from sgl_batch.core.answers import EngineStats
from sgl_batch.errors import EngineError
from sgl_batch.file_run.stats_poller import StatsPoller


class SlowStats:
    """Answers when released; counts the calls, and notes a cancellation."""

    served_model_names = ("tiny",)
    plan_rates = None

    def __init__(self):
        self.may_answer = asyncio.Event()
        self.num_asked = 0
        self.num_cancelled = 0

    async def respond(self, url, body, partial_output=None):
        raise AssertionError("not asked here")

    async def stats(self):
        self.num_asked += 1
        number = self.num_asked
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return EngineStats(counters={"asked": number})


def test_a_slow_answer_is_neither_waited_for_nor_asked_for_twice():
    async def scenario():
        engine = SlowStats()
        poller = StatsPoller(engine)
        assert await poller.poll(0.0) is None
        assert await poller.poll(0.0) is None
        engine.may_answer.set()
        late = await poller.poll(5.0)
        return engine, late

    engine, late = asyncio.run(scenario())
    assert late.counters == {"asked": 1}
    assert (engine.num_asked, engine.num_cancelled) == (1, 0)


def test_a_new_reading_is_asked_for_after_the_one_under_way():
    async def scenario():
        engine = SlowStats()
        poller = StatsPoller(engine)
        await poller.poll(0.0)
        engine.may_answer.set()
        return await poller.poll_new(5.0)

    assert asyncio.run(scenario()).counters == {"asked": 2}


def test_a_poll_of_a_dead_engine_raises():
    class Dead(SlowStats):
        async def stats(self):
            raise EngineError("gone")

    async def scenario():
        await StatsPoller(Dead()).poll(5.0)

    with pytest.raises(EngineError, match="gone"):
        asyncio.run(scenario())


def test_counters_since_an_earlier_reading():
    earlier = EngineStats(counters={"a": 1}, part_s={"experts": 2.0}, tokens_per_expert=[1, 2])
    later = EngineStats(counters={"a": 5, "b": 3}, part_s={"experts": 2.5}, tokens_per_expert=[1, 7])
    assert later.since(earlier) == EngineStats(
        counters={"a": 4, "b": 3}, part_s={"experts": 0.5}, tokens_per_expert=[0, 5]
    )
    assert later.since(EngineStats()) == EngineStats(
        counters={"a": 5, "b": 3}, part_s={"experts": 2.5}, tokens_per_expert=[1, 7]
    )
