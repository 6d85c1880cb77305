"""Simulates a batch on this machine by its kept profile: with the plan of `sgl-batch plan`, in each form of KV."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.cli.plan.predictor import Predictor, predictor_here
from sgl_batch.cli.plan.report import MEASURED
from sgl_batch.cli.plan.subject import check_subject, subject_of
from sgl_batch.cli.simulate.options import HERE_FLAGS
from sgl_batch.cli.simulate.report import COUNTED, MODELLED, account_message, workload_message
from sgl_batch.cli.simulate.subject import read_requests
from sgl_batch.config import from_mapping
from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import Candidate, most_running, plan_of
from sgl_batch.planner.candidates import kv_forms
from sgl_batch.planner.data_sheets import HERE
from sgl_batch.planner.held_back import HeldBack, held_back, usual_ratios
from sgl_batch.planner.layouts import Layout
from sgl_batch.planner.model_layers import MOE
from sgl_batch.planner.samples import Profile
from sgl_batch.planner.search import MemoryMap
from sgl_batch.planner.workload import DEFAULT, Request, Workload, parse_workload
from sgl_batch.simulator.kv_forms import FILE_PAGES, RankPages
from sgl_batch.simulator.machine_run import MachineRun, MachineSetup, run_on_machine
from sgl_batch.simulator.policies import Policy
from sgl_batch.simulator.requests import Requests
from sgl_batch.startup.hardware import hardware
from sgl_batch.startup.kept_profile import profile_that_holds

OURS = "batchgen"
_SOURCE = "the profile of this machine"
_MOST_RANKS = 64
_OF_CLUSTERS = {
    "host_memory": "--device-memory and --kv-store-bytes say what a run may take here",
    "calibrate": "a profile is measured already",
    "collapse": "all ranks are simulated here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HereSubject:
    """A model and a batch on this machine, and what predicts for it. `spread`: the cv of lengths."""

    profile: Profile
    predictor: Predictor
    requests: Requests
    spread: float
    ranks: int

    @property
    def title(self) -> str:
        """Return the model's name, for people."""
        return self.predictor.subject.directory.resolve().name


def read_here(args: argparse.Namespace) -> HereSubject:
    """Return what the command line names. Raises ConfigError, also where no profile holds here."""
    for name, instead in _OF_CLUSTERS.items():
        if getattr(args, name):
            raise ConfigError(f"--{name.replace('_', '-')} is for clusters; leave it out: {instead}")
    if hardware()["gpu"] is not None:
        raise ConfigError("--hardware here needs a profile, and profiles are of CPUs so far; name a cluster of GPUs")
    usual = parse_workload(DEFAULT)
    requests, spread = read_requests(args, workload=DEFAULT, num=usual.count)
    pairs = zip(requests.prompts.tolist(), requests.outputs.tolist(), strict=True)
    batch = Workload(requests=[Request(*pair) for pair in pairs], count=len(requests))
    config = from_mapping({name: getattr(args, name) for name in HERE_FLAGS})
    subject = subject_of(args.model, batch, dtype="auto", weight_dtype=config.forward.cpu_weight_dtype)
    check_subject(subject, config)
    profile = profile_that_holds(
        subject.directory,
        dtype=subject.dtype,
        weight_dtype=subject.weight_dtype,
        again=f"sgl-batch plan --model {shlex.quote(args.model)} --profile",
    )
    predictor = predictor_here(subject, config, profile)
    ranks = 1 if args.ranks is None else args.ranks
    experts = subject.layers.experts
    if not 1 <= ranks <= _MOST_RANKS or (experts and experts % ranks):
        divides = f", by which its {experts} experts can be divided" if experts else ""
        raise ConfigError(f"--ranks is {ranks}; it takes 1 to {_MOST_RANKS}{divides}")
    if not config.memory.device_memory:
        predictor = replace(predictor, budget=predictor.budget // ranks)
    return HereSubject(profile=profile, predictor=predictor, requests=requests, spread=spread, ranks=ranks)


def here_message(subject: HereSubject) -> dict[str, Any]:
    """Return what is simulated."""
    predictor, profile, machine = subject.predictor, subject.profile, hardware()
    ranks = "one rank" if subject.ranks == 1 else f"{subject.ranks} ranks"
    return {
        "model": {"name": subject.title, "title": subject.title, "source": str(predictor.subject.directory)},
        "hardware": {
            "name": HERE,
            "processor": machine["processor"],
            "cores": predictor.cores,
            "ranks": subject.ranks,
            "memory_bytes": predictor.budget,
            "profile": {"made": profile.made, "load": profile.load, "disturbed": profile.was_disturbed},
            "source": MEASURED,
            "text": (
                f"this machine, {predictor.cores} cores ({machine['processor']}), by its profile of {profile.made}; "
                f"{ranks} with {format_bytes(predictor.budget)} each for weights and KV"
            ),
        },
        "workload": workload_message(subject.requests, subject.spread),
    }


def here_policies(
    subject: HereSubject, policies: Sequence[Policy], *, until: float, intervals: bool
) -> list[dict[str, Any]]:
    """Return each policy with its run, or why there is none."""
    return [_policy_message(subject, one, until=until, intervals=intervals) for one in policies]


def _policy_message(subject: HereSubject, policy: Policy, *, until: float, intervals: bool) -> dict[str, Any]:
    head = {"name": policy.name, "title": policy.title, "says": policy.says}
    if policy.name != OURS:
        return {**head, "why": f"kernels of {policy.name} were not measured on this machine; {OURS} alone runs here"}
    if policy.gpus is not None:
        return {**head, "why": f"--ranks N says how many ranks an instance has on this machine; give {OURS} alone"}
    predictor, costs = subject.predictor, subject.predictor.costs_of(Layout())
    try:
        setups = list(_setups(subject))
    except ConfigError as error:
        return {**head, "why": str(error)}
    runs = sorted(
        (
            run_on_machine(one, costs, predictor.subject.layers, subject.requests, cores=predictor.cores, until=until)
            for one in setups
        ),
        key=lambda run: (-run.counts.finished, run.account.seconds),
    )
    best, *others = runs
    wanted = intervals and math.isinf(until)
    passes = held_back(subject.profile, predictor.subject.layers) if wanted else []
    message = {
        **head,
        **account_message(best.account, best.counts, idle=best.idle),
        "setup": best.setup.text(),
        "instances": 1,
        "notes": _notes(subject, told=not wanted or bool(passes)),
        "sources": {part: _SOURCE for part, seconds in best.account.parts.items() if seconds > 0},
        "source": MODELLED,
        "compared": len(runs),
        "others": [_run_message(run) for run in others],
    }
    if others:
        message["forms"] = [{**_run_message(run), "text": run.setup.where, "idle": round(run.idle, 4)} for run in runs]
    return {**message, "interval": _interval(best.account.seconds, passes)} if passes else message


def _setups(subject: HereSubject) -> Iterator[MachineSetup]:
    """Yield the plan in each form of KV that fits. Raises ConfigError where there is none."""
    predictor = subject.predictor
    base, dense = predictor.config, MOE not in predictor.subject.layers.layers
    found = _planned(predictor) if subject.ranks == 1 else _defaults(predictor, subject.ranks)
    for candidate, memory in found:
        room = memory.room
        yield MachineSetup(
            candidate=candidate,
            plan=plan_of(candidate, base, page_size=predictor.page_size, dense=dense),
            memory=RankPages(device=room.device, store=room.store or FILE_PAGES),
            ranks=subject.ranks,
            request_slots=max(most_running(candidate) // subject.ranks, 1),
            admission=base.schedule.admission,
            migration=base.ranks.migration,
        )


def _planned(predictor: Predictor) -> list[tuple[Candidate, MemoryMap]]:
    """Return the best plan of each form of KV. Raises ConfigError where none fits."""
    outcome = predictor.search()
    if not outcome.ranked:
        raise ConfigError(f"no plan fits: {outcome.lacks}")
    best: dict[str, tuple[Candidate, MemoryMap]] = {}
    for one in outcome.ranked:
        best.setdefault(one.candidate.kv, (one.candidate, one.memory))
    return list(best.values())


def _defaults(predictor: Predictor, ranks: int) -> list[tuple[Candidate, MemoryMap]]:
    """Return the engine's default limits, with which several ranks start, in each form of KV that fits."""
    memory = predictor.config.memory
    memory_of = predictor.memory(Layout(ranks=ranks))
    found = [
        (candidate, memory_of(candidate))
        for candidate in map(predictor.default, kv_forms(store_bytes=memory.kv_store_bytes, mode=memory.kv_store_mode))
    ]
    fitting = [one for one in found if not one[1].lacks]
    if not fitting:
        raise ConfigError(f"the engine's defaults do not fit {ranks} ranks: {found[0][1].lacks}")
    return fitting


def _notes(subject: HereSubject, *, told: bool) -> list[str]:
    profile, notes = subject.profile, []
    if profile.was_disturbed:
        notes.append(
            f"other programs kept {profile.load:g} of {subject.predictor.cores} cores busy when the profile was made; "
            "make it again when they do not run"
        )
    if subject.ranks > 1:
        notes.append(
            "several ranks have the engine's default limits, as no plan is made for them; what they take to exchange "
            "rows is not in the profile"
        )
    if not told:
        notes.append("no interval: the profile has too few sizes to hold some of them back from its fit")
    return notes


def _run_message(run: MachineRun) -> dict[str, Any]:
    return {"text": run.setup.text(), "seconds": round(run.account.seconds, 3), "collapsed": False}


def _interval(seconds: float, passes: Sequence[HeldBack]) -> dict[str, Any]:
    """Return how long the run takes if all passes were off as those that were held back from the fit."""
    low, high = usual_ratios(passes)
    return {
        "low_s": round(min(low, 1.0) * seconds, 3),
        "high_s": round(max(high, 1.0) * seconds, 3),
        "flips": [],
        "moved": 0,
        "strongest": [],
        "passes": len(passes),
        "source": COUNTED,
        "text": (
            f"of {len(passes)} passes that were held back from the profile's fit, eight of ten took {low:.2f} to "
            f"{high:.2f} times what it says; other programs, and how lengths differ, are not in it"
        ),
    }
