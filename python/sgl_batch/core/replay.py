"""Makes recorded decisions again, with the code that the engine runs, and reports where the actions differ.

Records are read in order, because a policy may decide by what it measured in earlier intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_batch.config import from_mapping
from sgl_batch.core import decide
from sgl_batch.core.admission_policy import AsNoted
from sgl_batch.core.decision_record import COUNTS, VERSION, plain_actions, plain_group
from sgl_batch.core.decode_streaming import StreamingChoice
from sgl_batch.core.early_copies import HeldCopy
from sgl_batch.core.ended_lengths import EndedLengths
from sgl_batch.core.exclusive import TierCapacity
from sgl_batch.core.group_callbacks import Callbacks
from sgl_batch.core.group_view import Callback
from sgl_batch.core.growth import extend_running
from sgl_batch.core.kv_policy import DeviceOnly, KVPolicy, Overflowing
from sgl_batch.core.kv_state import Interval, KVState
from sgl_batch.core.move_costs import MoveRates
from sgl_batch.core.page_boundary import State
from sgl_batch.core.page_ledger import PageLedger
from sgl_batch.core.partition_costs import PartitionCosts
from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.rank_agreement import decide_group
from sgl_batch.core.rank_moves import Migration
from sgl_batch.core.rank_state import Movable, RankState
from sgl_batch.core.resident_prompts import ResidentPrompts
from sgl_batch.core.sequence import SequenceState, Status
from sgl_batch.core.store_lease import StoreUse
from sgl_batch.core.store_policies import Exclusive, Inclusive, Streamed
from sgl_batch.errors import ConfigError

Record = Mapping[str, Any]
FindCallback = Callable[[str, str], Callback]

# Policies by their names in records.
POLICIES: dict[str, Callable[[], KVPolicy]] = {
    "device": DeviceOnly,
    "overflowing": Overflowing,
    "inclusive": Inclusive,
    "exclusive": Exclusive,
    "exclusive on device": lambda: Exclusive(to_store=False),
    "streamed": Streamed,
    "streamed by choice": lambda: Streamed(StreamingChoice()),
}


class ReplayError(Exception):
    """A record cannot be replayed: it has another version, or the decision reads more than was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A decision whose replayed actions differ. `number` counts records from 1."""

    number: int
    recorded: Any
    replayed: Any


class _RecordedView(Sequence[SequenceState]):
    """The recorded head of a view. Its length is that of the whole view."""

    def __init__(self, plain: Record) -> None:
        self._rows, self._count = [_sequence(row) for row in plain["rows"]], int(plain["count"])

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[SequenceState]:
        yield from self._rows
        if self._count > len(self._rows):
            raise ReplayError(f"the decision reads more than the {len(self._rows)} sequences that are recorded")

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("decisions read a view in its order")

    def of_prompt(self, group: str) -> list[SequenceState]:
        """Return the sequences of a prompt group; a decision that reads its first has recorded all."""
        return [sequence for sequence in self._rows if sequence.prompt_group == group]


def unknown_callback(which: str, name: str) -> Callback:
    """Raise ReplayError: the callback of this name is not known here."""
    raise ReplayError(f"{which} was {name!r}, which is not known here")


def replay_trace(
    events: Iterable[Record], find_callback: FindCallback = unknown_callback
) -> tuple[int, list[Difference]]:
    """Return how many decisions a trace holds, of all ranks and engines, and those that differ when replayed.

    `find_callback`: as in `replay`.
    """
    of_process: dict[tuple[Any, Any], list[Record]] = {}
    for event in events:
        if "decision" in event:
            of_process.setdefault((event["engine"], event["rank"]), []).append(event)
    differences = [one for records in of_process.values() for one in replay(records, find_callback)]
    return sum(map(len, of_process.values())), differences


def replay(records: Iterable[Record], find_callback: FindCallback = unknown_callback) -> Iterator[Difference]:
    """Yield the decisions of one rank that differ from their records. Raises ReplayError for another version.

    `find_callback`: returns a user's callback by what it decides (`on_refill`, `on_long_tail`) and its name; it raises
    ConfigError or ReplayError where there is none. The decisions of such a callback differ then.

    A decision differs, too, if its plan is another than the one in force: that of the first record, or of the last
    recorded change.
    """
    memory = _Memory(find_callback)
    in_force: Any = None
    for number, record in enumerate(records, 1):
        if record.get("version") != VERSION:
            raise ReplayError(f"record {number} has version {record.get('version')}; this program reads {VERSION}")
        known, in_force = in_force, _plan_after(record, in_force)
        try:
            _check_plan(record, known)
            replayed = _replayed(record, memory)
        except (ReplayError, ConfigError) as error:
            replayed = f"{error}"
        except AssertionError as error:
            replayed = f"the decision fails: {error}"
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # a record that no engine has written
            replayed = f"the decision fails: {type(error).__name__}: {error}"
        if replayed != record["actions"]:
            yield Difference(number=number, recorded=record["actions"], replayed=replayed)


def _plan_after(record: Record, in_force: Any) -> Any:
    """Return the plan in force after a record; `in_force`: before it, None where it is not known yet."""
    return record["actions"] if record["decision"] == "plan" else record.get("plan", in_force)


def _check_plan(record: Record, in_force: Any) -> None:
    """Raise ReplayError for a record whose plan is not the one in force."""
    found = record.get("before" if record["decision"] == "plan" else "plan")
    if found is not None and in_force is not None and found != in_force:
        raise ReplayError(f"its plan is not the one in force, which is {in_force}")


class _Memory:
    """What the decisions of one process remember: its policies, and the lengths of outputs that have ended."""

    def __init__(self, find_callback: FindCallback) -> None:
        self.policies: dict[str, KVPolicy] = {}
        self.ended = EndedLengths()
        self._find, self._found = find_callback, dict[tuple[str, str], Callback]()

    def callbacks(self, names: Mapping[str, str]) -> Callbacks:
        """Return the callbacks of these names."""
        for given in names.items():
            if given not in self._found:
                self._found[given] = self._find(*given)
        return Callbacks(names=names, **{which: self._found[which, name] for which, name in names.items()})


def _replayed(record: Record, memory: _Memory) -> Any:
    match record["decision"]:
        case "plan":
            return PlanInForce(from_mapping(record["flags"])).fit(**record["device"]).as_dict()
        case "group":
            return _group(record, memory)
        case "arrival":
            return _arrival(record)
        case _:
            return _own(record, memory.policies)


def _arrival(record: Record) -> Any:
    device = PageLedger(record["device_pages"], record["page_size"])
    store = None if record["store_pages"] is None else PageLedger(record["store_pages"], record["page_size"])
    most = record["most_prompt_tokens"]
    return plain_actions(decide.on_arrival(_sequence(record["sequence"]), device, store, most_prompt_tokens=most))


def _own(record: Record, policies: dict[str, KVPolicy]) -> Any:
    name = record["policy"]
    policy = policies.setdefault(name, POLICIES[name]())
    plan = plan_of(record["plan"])
    state, kv = _state(record["state"]), _kv(record["kv"], plan.page_size)
    if record["decision"] == "step":
        return plain_actions((decide.compose(state, kv, plan, policy),))
    if record["decision"] == "boundary":
        return plain_actions(policy.at_boundary(state, kv, plan, others_run=record["others_run"]))
    if record["decision"] == "growth":
        return plain_actions(extend_running(kv, plan))
    return plain_actions(decide.decide(state, kv, plan, policy))


def _group(record: Record, memory: _Memory) -> Any:
    ranks = [_rank(rank) for rank in record["ranks"]]
    for rank in ranks:
        for length in rank.ended:
            memory.ended.add(length)
    callbacks = memory.callbacks(record["callbacks"])
    migration = Migration(record["migration"])
    costs = None if record["costs"] is None else PartitionCosts.of(record["costs"])
    return plain_group(decide_group(ranks, plan_of(record["plan"]), migration, callbacks, memory.ended, costs))


def plan_of(plain: Record) -> Plan:
    """Return a plan that was written with `Plan.as_dict`."""
    phases = {name: PhasePlan(**plain[name]) for name in ("prefill", "decode")}
    return Plan(**{**plain, **phases})


def _sequence(row: Record) -> SequenceState:
    return SequenceState(**{**row, "status": Status(row["status"]), "ranks": frozenset(row["ranks"])})


def _state(plain: Record) -> State:
    counts = {attribute: plain[name] for name, attribute in COUNTS.items()}
    begun = None if plain["begun"] is None else _sequence(plain["begun"])
    return State(queued=_RecordedView(plain["queued"]), ready=_RecordedView(plain["ready"]), begun=begun, **counts)


def _kv(plain: Record, page_size: int) -> KVState:
    if "device" not in plain:  # a decision between boundaries
        nothing = PageLedger(0, page_size)
        return KVState(
            device=nothing, admission=nothing, runners=tuple, estimate_shared=lambda _: None, arrived=plain["arrived"]
        )
    admission = plain["admission"]
    if admission["is_device"] and "needs" in admission:
        device: PageLedger = _growing_account(admission, page_size)
    else:
        device = _device_account(plain["device"], page_size)
    prompts = ResidentPrompts[int]()
    for name, pages in plain["resident_prompts"].items():
        prompts.enter(name, pages)
    runners = [_sequence(row) for row in plain["runners"]]
    return KVState(
        device=device,
        admission=device if admission["is_device"] else _account(admission, page_size),
        runners=lambda: runners,
        estimate_shared=lambda _: None,  # the recorded sequences hold the estimate
        prompts=prompts,
        pages_of=lambda name: plain["prompt_pages_of"].get(name, ()),
        choices=_RecordedView(plain["choices"]),
        store_free=plain["store_free"],
        arrived=plain["arrived"],
        streams=plain["streams"],
        interval=Interval(**plain["interval"]),
    )


def _device_account(plain: Record, page_size: int) -> PageLedger:
    device = PageLedger(plain["total_pages"], page_size)
    for name, pages in plain["reserved"].items():
        device.reserve(name, pages)
    device.add_prompt_pages(plain["prompt_pages"])
    return device


def _growing_account(plain: Record, page_size: int) -> PageLedger:
    ledger = PageLedger(plain["total_pages"], page_size, policy=AsNoted())
    for name, pages in plain["reserved"].items():
        ledger.reserve(name, pages, whole=plain["needs"][name])
    ledger.add_prompt_pages(plain["prompt_pages"])
    ledger.stalled, ledger.borrower = dict(plain["stalled"]), plain["borrower"]
    ledger.away = set(plain["away"])
    ledger.pool_pages, ledger.admits = plain["pool_pages"], plain["admits"]
    return ledger


def _account(plain: Record, page_size: int) -> PageLedger:
    if "needs" in plain:
        return _growing_account(plain, page_size)
    numbers = {name: plain[name] for name in ("total_pages", "free_pages", "overflow_pages", "largest")}
    empty = State(queued=(), ready=(), running=0, steps=0, request_slots=0, free_request_slots=0, filling=False)
    account = RankState(state=empty, **numbers).ledger(page_size)
    account.pool_pages, account.admits, account.two_tiers = plain["pool_pages"], plain["admits"], plain["two_tiers"]
    return account


def _rank(plain: Record) -> RankState:
    numbers = {name: plain[name] for name in ("total_pages", "free_pages", "overflow_pages", "largest")}
    return RankState(
        state=_state(plain["state"]),
        capacity=None if plain["capacity"] is None else TierCapacity(**plain["capacity"]),
        ready=[_movable(item) for item in plain["ready"]],
        running=[_movable(item) for item in plain["running"]],
        ended=tuple(plain["ended"]),
        **numbers,
        partition=frozenset(plain["partition"]),
        held=[HeldCopy(**copy) for copy in plain["held"]],
        **{name: plain[name] for name in ("grows", "largest_gap", "has_waiting", "lacking", "device_room")},
        **{name: plain[name] for name in ("replicas", "takes_replicas", "replica_room", "sends_pages")},
        store=None if plain["store"] is None else StoreUse(**plain["store"]),
        queued=[_movable(item) for item in plain["queued"]],
        rates=MoveRates(**plain["rates"]),
    )


def _movable(plain: Record) -> Movable:
    numbers = {name: plain[name] for name in ("tokens", "pages", "gap", "leased", "replicable")}
    return Movable(sequence=_sequence(plain["sequence"]), **numbers)
