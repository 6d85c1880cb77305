"""What a pool of instances does with lines: where they run, and what becomes of them when an instance dies."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from itertools import zip_longest

import msgspec
import pytest
from scripted_member import ScriptedMember

from sgl_batch.control_plane.instances import pool as pool_module
from sgl_batch.control_plane.instances.messages import key_of
from sgl_batch.control_plane.instances.pool import InstancePool
from sgl_batch.control_plane.instances.summed_stats import InstanceStats
from sgl_batch.core.answers import EngineStats
from sgl_batch.core.partial_output import PartialOutput
from sgl_batch.engine.line_frames import pack_body
from sgl_batch.errors import EngineError

URL = "/v1/completions"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(pool_module, "_PAUSE_S", 0.001)
    monkeypatch.setattr(pool_module, "_LONG_PAUSE_S", 0.001)


@asynccontextmanager
async def pool_of(*members, **settings):
    pool = InstancePool(**settings)
    for member in members:
        pool.join(member)
    try:
        yield pool
    finally:
        await pool.close()


def body(number):
    return {"prompt": f"line-{number}", "seed": number}


def ask(pool, numbers, outputs=()):
    calls = (pool.respond(URL, body(number), output) for number, output in zip_longest(numbers, outputs))
    return [asyncio.ensure_future(call) for call in calls]


async def answers(tasks):
    return [one.body for one in await asyncio.wait_for(asyncio.gather(*tasks), 20)]


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it does not come about")


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario, 30))


def test_each_line_is_answered_once_by_one_of_the_instances():
    async def scenario():
        members = ScriptedMember("a", rate=5), ScriptedMember("b", rate=5)
        async with pool_of(*members) as pool:
            found = await answers(ask(pool, range(300)))
            assert {one["by"] for one in found} == {"a", "b"}
        served = members[0].served + members[1].served
        assert sorted(served) == sorted(pack_body(body(number)) for number in range(300))

    run(scenario())


def test_statistics_are_read_when_they_are_asked_for_and_reported_ones_count_where_no_engine_answers(monkeypatch):
    async def scenario():
        quick, slow = ScriptedMember("a", rate=5), ScriptedMember("b", rate=5)
        async with pool_of(quick, slow) as pool:
            await answers(ask(pool, range(40)))
            await until(lambda: pool.reported_stats().counters["output_tokens"] == 40)
            quick.unreported, slow.unreported = 1, 2
            slow.read_after_s = 0.05  # several reports of the other come in meanwhile
            assert (await pool.stats()).counters["output_tokens"] == 43
            await until(lambda: pool.reported_stats().counters["output_tokens"] == 40)
            monkeypatch.setattr(pool_module, "_READ_WITHIN_S", 0.01)
            quick.unreported, slow.read_after_s = 0, 60
            assert (await pool.stats()).counters["output_tokens"] == 40
            quick.lose()
            assert (await pool.stats()).counters["output_tokens"] == 40

    run(scenario())


def test_a_reading_of_an_engine_that_another_has_followed_counts_nothing():
    stats = InstanceStats()
    for tokens, restarts in ((5, 0), (2, 1), (5, 0)):
        stats.see(EngineStats(counters={"output_tokens": tokens}), restarts)
    assert stats.total().counters == {"output_tokens": 7}
    sent = msgspec.json.decode(msgspec.json.encode(stats.total()), type=EngineStats)
    assert isinstance(sent.counters["output_tokens"], int), "counts stay whole on their way between machines"


def test_lots_are_large_while_many_lines_wait_and_small_at_the_end():
    async def scenario():
        members = ScriptedMember("a", rate=40), ScriptedMember("b", rate=40)
        async with pool_of(*members, depth=200) as pool:
            await answers(ask(pool, range(1000)))
        sizes = [len(lot) for lot in members[0].lots]
        assert max(sizes) >= 64
        assert sizes[-1] < 10

    run(scenario())


def test_lines_of_a_lost_instance_go_on_elsewhere_from_the_tokens_that_it_reported():
    async def scenario():
        lost, other = ScriptedMember("a", rate=0), ScriptedMember("b")
        reasons = []
        async with pool_of(lost, on_lost=lambda member, why: reasons.append((member.name, why))) as pool:
            partial = PartialOutput()
            asked = asyncio.ensure_future(pool.respond(URL, body(1), partial))
            await until(lambda: lost.running)
            lost.tokens = {key: [5, 6, 7] for key in lost.running}
            await until(lambda: len(partial) == 3)
            lost.lose()
            pool.join(other)
            assert (await asked).body == {"by": "b"}
            assert [view.name for view in pool.members()] == ["b"]
        assert reasons == [("a", "its node is gone")]
        assert list(partial.tokens) == [5, 6, 7]

    run(scenario())


def test_a_line_that_kills_engines_gets_an_error_and_all_others_are_answered():
    async def scenario():
        members = ScriptedMember("a", poison=[b'"line-7"']), ScriptedMember("b", poison=[b'"line-7"'])
        async with pool_of(*members) as pool:
            found = await asyncio.gather(*ask(pool, range(100)))
        failed = [number for number, one in enumerate(found) if one.status_code != 200]
        assert failed == [7]
        assert found[7].body["error"]["code"] == "engine_crashed"
        given = [lot for member in members for lot in member.lots if any(b'"line-7"' in one for one in lot)]
        assert sum(len(lot) == 1 for lot in given) == 2

    run(scenario())


def test_lines_that_an_engine_had_not_begun_are_not_suspected_of_its_death():
    async def scenario():
        member = ScriptedMember("a", rate=0)
        outputs = [PartialOutput() for _ in range(100)]
        async with pool_of(member) as pool:
            tasks = ask(pool, range(100), outputs)
            await until(lambda: len(member.running) == 100)
            member.tokens = {key: [1] for key in list(member.running)[:10]}
            await until(lambda: sum(map(len, outputs)) == 10)
            lots = len(member.lots)
            member.die()
            member.tokens = {}
            member.rate = 1000
            await answers(tasks)
        sizes = [len(lot) for lot in member.lots[lots:]]
        assert sum(sizes) == 100
        assert sizes[:10] == [1] * 10  # few suspects run one by one

    run(scenario())


def test_the_others_go_on_while_an_instance_whose_engine_died_starts_again():
    async def scenario():
        died, other = ScriptedMember("a", rate=0), ScriptedMember("b", rate=1)
        async with pool_of(died, other) as pool:
            tasks = ask(pool, range(200))
            await until(lambda: died.running and other.running)
            died.phase = "restarting"
            died.die()
            await until(lambda: len(other.served) > 20)
            assert not died.running
            died.phase, died.rate, other.rate = "ready", 1000, 1000
            await answers(tasks)
        assert died.served

    run(scenario())


def test_a_line_that_waits_for_an_instance_that_runs_suspects_goes_on_elsewhere_when_that_is_lost():
    async def scenario():
        computed = key_of(URL, pack_body(body(9)), 0)
        lost, other = ScriptedMember("a", rate=0, computing=[computed]), ScriptedMember("b")
        outputs = [PartialOutput(), PartialOutput()]
        async with pool_of(lost) as pool:
            asked = ask(pool, [1, 2], outputs)
            await until(lambda: len(lost.running) == 3)
            lost.tokens = {key: [1] for key in lost.running}
            await until(lambda: all(map(len, outputs)))  # it has begun both, so it suspects both
            lost.die()
            await until(lambda: len(lost.running) == 1)
            asked += ask(pool, [9])
            await asyncio.sleep(0.01)
            lost.lose()
            pool.join(other)
            assert await answers(asked) == [{"by": "b"}] * 3

    run(scenario())


def test_a_death_whose_reason_is_known_blames_no_line():
    async def scenario():
        member = ScriptedMember("a", rate=0)
        async with pool_of(member) as pool:
            tasks = ask(pool, range(30))
            await until(lambda: len(member.running) == 30)
            for _ in range(3):
                member.die("no_space")
                await until(lambda: len(member.running) == 30)
            member.rate = 1000
            assert len(await answers(tasks)) == 30

    run(scenario())


def test_an_answer_of_an_earlier_server_is_used_and_a_line_that_is_computed_is_not_given_to_another():
    async def scenario():
        kept, computed = (key_of(URL, pack_body(body(number)), 0) for number in (1, 2))
        before, other = ScriptedMember("a", rate=0, kept=[kept], computing=[computed]), ScriptedMember("b")
        async with pool_of() as pool:
            pool.join(other)
            pool.join(before, from_before=True)
            tasks = ask(pool, (1, 2, 3))
            await until(lambda: tasks[0].done() and tasks[2].done())
            assert tasks[0].result().body == {"kept": 1}
            before.rate = 1
            assert (await asyncio.wait_for(tasks[1], 5)).body == {"by": "a"}
        assert pack_body(body(2)) not in other.served

    run(scenario())


def test_equal_lines_are_answered_one_by_one():
    async def scenario():
        member = ScriptedMember("a", rate=3)
        async with pool_of(member) as pool:
            assert len(await answers(ask(pool, [1] * 10))) == 10
        assert len(member.served) == 10

    run(scenario())


def test_an_instance_hears_of_the_answers_that_are_committed_and_of_those_that_nobody_wants():
    async def scenario():
        member = ScriptedMember("a", rate=0)
        async with pool_of(member) as pool:
            first, second = ask(pool, (1, 2))
            await until(lambda: len(member.running) == 2)
            keys = list(member.running)
            second.cancel()
            await until(lambda: member.cancelled)
            assert member.cancelled == [keys[1]]
            member.rate = 1
            response = await first
            assert member.acknowledged == []
            pool.acknowledge([response.request_id])
            await until(lambda: member.acknowledged)
            assert member.acknowledged == [keys[0]]

    run(scenario())


def test_the_next_incarnation_need_not_keep_answers_that_were_committed_when_the_last_one_had_gone():
    async def scenario():
        before = ScriptedMember("a")
        async with pool_of(before) as pool:
            first, second = await asyncio.gather(*ask(pool, [1, 2]))
            before.lose()
            pool.acknowledge([first.request_id])
            await until(lambda: not pool.members())
            pool.acknowledge([second.request_id])
            kept = [key_of(URL, pack_body(body(number)), 0) for number in (1, 2)]
            following = ScriptedMember("a", incarnation=2, kept=kept)
            pool.join(following)
            await until(lambda: sorted(following.acknowledged) == sorted(kept))

    run(scenario())


def test_at_the_end_a_slow_instance_gives_up_lines_that_it_has_not_begun():
    async def scenario():
        slow, fast = ScriptedMember("slow", rate=0), ScriptedMember("fast", rate=2)
        # Rates are measured over busy seconds; with a clock that runs faster they are known sooner.
        async with pool_of(slow, depth=4000, clock=lambda: 200 * time.monotonic()) as pool:
            tasks = ask(pool, range(400))
            await until(lambda: len(slow.running) == 400)
            pool.join(fast)
            tasks += ask(pool, range(400, 410))
            slow.rate = 1
            found = await answers(tasks)
        by_fast = sum(one["by"] == "fast" for one in found)
        assert by_fast > 100, by_fast
        assert len(slow.served) + len(fast.served) == 410

    run(scenario())


def test_a_drained_instance_gives_up_what_it_has_not_begun_and_ends_what_it_has():
    async def scenario():
        leaving, staying = ScriptedMember("a", rate=0), ScriptedMember("b")
        async with pool_of(leaving) as pool:
            tasks = ask(pool, range(50))
            await until(lambda: len(leaving.running) == 50)
            begun = list(leaving.running)[:10]
            leaving.tokens = {key: [1] for key in begun}
            pool.join(staying)
            drained = asyncio.ensure_future(pool.drain(leaving))
            await until(lambda: len(staying.served) == 40)
            assert not drained.done()
            leaving.rate = 5
            await asyncio.wait_for(drained, 5)
            assert len(await answers(tasks)) == 50
        assert len(leaving.served) == 10

    run(scenario())


def test_a_drained_instance_gets_no_line_that_it_computes_for_an_earlier_server():
    async def scenario():
        computed = key_of(URL, pack_body(body(1)), 0)
        drained, other = ScriptedMember("a", rate=0, computing=[computed]), ScriptedMember("b")
        async with pool_of() as pool:
            pool.join(other)
            pool.join(drained, from_before=True)
            await until(lambda: all(one.phase == "ready" for one in pool.members()))
            await pool.drain(drained)
            assert await answers(ask(pool, [1])) == [{"by": "b"}]

    run(scenario())


def test_without_any_instance_left_for_good_all_lines_raise_the_reason():
    async def scenario():
        async with pool_of() as pool:
            tasks = ask(pool, range(3))
            await asyncio.sleep(0)
            pool.fail(EngineError("no instance starts", code="bad_usage"))
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [(str(one), one.code) for one in found] == [("no instance starts", "bad_usage")] * 3
            with pytest.raises(EngineError, match="no instance starts"):
                await pool.respond(URL, body(9))

    run(scenario())


def test_an_instance_is_prepared_before_it_gets_lines_and_gets_none_while_it_is_outdated():
    async def scenario():
        late, other = ScriptedMember("a"), ScriptedMember("b")
        late.phase = "outdated"
        prepared = []

        async def prepare(member):
            assert not member.lots
            prepared.append(member.name)

        async with pool_of(late, other, prepare=prepare) as pool:
            found = await answers(ask(pool, range(20)))
            assert {one["by"] for one in found} == {"b"}
            assert [member for member, _ in pool.loads()] == [other]
            assert pool.all_members() == [late, other]
            late.phase, other.phase = "ready", "outdated"
            await until(lambda: [member for member, _ in pool.loads()] == [late])
            found = await answers(ask(pool, range(20, 40)))
            assert {one["by"] for one in found} == {"a"}
        assert sorted(prepared) == ["a", "b"]

    run(scenario())


def test_lines_begin_anew_elsewhere_once_their_tokens_are_forgotten():
    async def scenario():
        lost = ScriptedMember("a", rate=0)
        async with pool_of(lost) as pool:
            partial = PartialOutput()
            asked = asyncio.ensure_future(pool.respond(URL, body(1), partial))
            await until(lambda: lost.running)
            lost.tokens = {key: [5, 6, 7] for key in lost.running}
            await until(lambda: len(partial) == 3)
            lost.tokens = {}
            await asyncio.sleep(0.01)
            pool.forget_old_weights()
            assert len(partial) == 0
            lost.lose()
            pool.join(ScriptedMember("b"))
            assert (await asked).body == {"by": "b"}
            assert len(partial) == 0

    run(scenario())


def test_an_answer_of_an_earlier_server_serves_no_line_after_an_update_of_weights():
    async def scenario():
        key = key_of(URL, pack_body(body(1)), 0)
        member = ScriptedMember("a", kept=[key])
        async with pool_of() as pool:
            pool.join(member, from_before=True)
            await until(lambda: pool.current() is not None)
            pool.forget_old_weights()
            (found,) = await answers(ask(pool, [1]))
            assert found == {"by": "a"}
            await until(lambda: key in member.acknowledged)

    run(scenario())
