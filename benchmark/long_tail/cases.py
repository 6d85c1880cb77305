"""Owns the cases of the long tail: which sequences run, on how many engines and ranks, in which mode."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison.workload import Workload
from several_ranks.workloads import FEWEST, Budget

from sgl_batch.config import field_names
from sgl_batch.errors import ConfigError

_SETTINGS = {
    "max_total_tokens": 1 << 16,
    "share_prefixes": False,
    "speculate": "off",
    "partition_below": 0,
    "partition_costs": "off",
}
_PHRASE_TOKENS, _PHRASES = 24, 16
_FIRST_TOKEN = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the cases are.

    Attributes:
        ranks: Of an engine with several, each with an equal share of the cores.
        many: Sequences of case a.
        few: Sequences of case b.
        input_tokens: Of a prompt in a and b, on average.
        output_tokens: Of an output in a and b, on average.
        trace: File that the lengths of a and b are drawn from; None for the made-up tail.
        straggler_tokens: Of the output in case c.
        prompt_tokens: Of the prompt in case d.
        partition_below: Of the engines that partition.
        partition_least_tokens: Of the engines that partition.
        boundary_tokens: Decode steps from boundary to boundary.
        page_size: Tokens.
        prompt_options: More options of the engine whose ranks prefill one prompt together.
        seed: Of prompts, their order, and what is drawn.
    """

    ranks: int = 2
    many: int = 416
    few: int = 104
    input_tokens: int = 32
    output_tokens: int = 20
    trace: Path | None = None
    straggler_tokens: int = 2000
    prompt_tokens: int = 16384
    partition_below: int = 2
    partition_least_tokens: int = 64
    boundary_tokens: int = 64
    page_size: int = 64
    prompt_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ConfigError(f"--ranks is {self.ranks}; what is measured takes at least 2")
        fewest = 1 if self.trace else FEWEST
        least = {"many": fewest, "few": fewest, "straggler_tokens": 1, "prompt_tokens": 1}
        for name, limit in least.items():
            if (value := getattr(self, name)) < limit:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {limit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to run sequences.

    Attributes:
        name: The letter of its bar, and the way.
        work: All sequences.
        options: Of each engine.
        engines: How many run at once. Several have a part of the sequences each, and one rank's share of the cores.
        ranks: Of each engine. One rank has one rank's share of the cores.
    """

    name: str
    work: Workload
    options: Mapping[str, Any]
    engines: int = 1
    ranks: int = 1


def modes(sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Return the options of several ranks by mode. The last three are what each adds to `spread`, and all of it."""
    spread = {"migration": "even"}
    least = sizes.partition_least_tokens
    partition = {
        "partition_below": sizes.partition_below,
        "partition_least_tokens": least,
        "partition_experts": "split",
    }
    return {
        "nothing": {"migration": "never"},
        "migration": {**spread, "on_long_tail": "long_tail.callbacks:nothing_moves"},
        "spread": spread,
        "partition": {**spread, **partition},
        "speculation": {**spread, "speculate": "auto"},
        "all": {**spread, **partition, "speculate": "auto"},
    }


def known(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of our options that this engine has, and SGLang's, so that older engines can be measured too."""
    names = field_names() | {"max_total_tokens"}
    return {name: value for name, value in options.items() if name in names}


def make_cases(sizes: Sizes, config: Mapping[str, Any]) -> list[Case]:
    """Return all cases for a model of this `config`. Raises ConfigError for sizes that cannot be."""
    vocabulary = config["vocab_size"]
    many, few = (_tail(sizes, count, vocabulary) for count in (sizes.many, sizes.few))
    straggler, prompt = _straggler(sizes, vocabulary), _long_prompt(sizes, vocabulary)
    one = {**known(_SETTINGS), "boundary_tokens": sizes.boundary_tokens, "page_size": sizes.page_size}
    sizes_of = dict.fromkeys(("tp_size", "dp_size", "ep_size"), sizes.ranks)
    ranks = {**one, **sizes_of, "enable_dp_attention": True, "rank_timeout_s": 60.0}
    several = {name: {**ranks, **options} for name, options in modes(sizes).items()}
    together = several["partition"]
    shared_prompt = {**together, **known({"partition_prompt_tokens": sizes.prompt_tokens}), **sizes.prompt_options}
    found: list[Case] = []
    for letter, work in (("a", many), ("b", few)):
        found.append(Case(name=f"{letter} separate", work=work, options=one, engines=sizes.ranks))
        if letter == "b":
            found.append(Case(name="b longest", work=longest(work), options=together, ranks=sizes.ranks))
        found += [
            Case(name=f"{letter} {name}", work=work, options=options, ranks=sizes.ranks)
            for name, options in several.items()
        ]
    found.append(Case(name="c one rank", work=straggler, options=one))
    found.append(Case(name="c drafts", work=straggler, options={**one, "speculate": "auto"}))
    found += [
        Case(name=f"c {name}", work=straggler, options=several[name], ranks=sizes.ranks)
        for name in ("nothing", "partition", "all")
    ]
    found.append(Case(name="d one rank", work=prompt, options=one))
    found.append(Case(name="d partition", work=prompt, options=shared_prompt, ranks=sizes.ranks))
    return [_fitting(case, config) for case in found]


def chosen(cases: Sequence[Case], only: str) -> list[Case]:
    """Return the cases that `only` names, by name or letter, with commas between them; all if it is empty."""
    wanted = [one.strip() for one in only.split(",") if one.strip()]
    unknown = [one for one in wanted if not any(one in (case.name, case.name[0]) for case in cases)]
    if unknown:
        raise ConfigError(
            f"--only has {unknown[0]!r}; it takes letters and names of {', '.join(case.name for case in cases)}"
        )
    return [case for case in cases if not wanted or case.name in wanted or case.name[0] in wanted]


def dealt(work: Workload, count: int) -> list[list[int]]:
    """Return the numbers of the sequences in `count` parts with about as many tokens each, in order."""
    tokens = [len(prompt) + output for prompt, output in zip(work.prompts, work.output_lens, strict=True)]
    parts: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for number in sorted(range(len(tokens)), key=lambda number: (-tokens[number], number)):
        least = sums.index(min(sums))
        parts[least].append(number)
        sums[least] += tokens[number]
    return [sorted(part) for part in parts]


def longest(work: Workload) -> Workload:
    """Return the sequence with the longest output alone."""
    number = max(range(len(work.prompts)), key=lambda number: work.output_lens[number])
    tokens = work.output_lens[number]
    return Workload(
        prompts=[work.prompts[number]], output_lens=[tokens], description=f"the longest alone, {tokens} output tokens"
    )


def _tail(sizes: Sizes, count: int, vocabulary: int) -> Workload:
    budget = Budget(
        num_prompts=count,
        input_tokens=count * sizes.input_tokens,
        output_tokens=count * sizes.output_tokens,
        vocabulary=vocabulary,
        seed=sizes.seed,
    )
    return budget.tail() if sizes.trace is None else budget.trace(sizes.trace)


def _straggler(sizes: Sizes, vocabulary: int) -> Workload:
    """Return one sequence whose prompt repeats a phrase."""
    phrase = _random_tokens(_PHRASE_TOKENS, vocabulary, sizes.seed)
    return Workload(
        prompts=[phrase * _PHRASES],
        output_lens=[sizes.straggler_tokens],
        description=f"{_PHRASES} times the same {_PHRASE_TOKENS} tokens, {sizes.straggler_tokens:,} output tokens",
    )


def _long_prompt(sizes: Sizes, vocabulary: int) -> Workload:
    prompt = _random_tokens(sizes.prompt_tokens, vocabulary, sizes.seed)
    return Workload(prompts=[prompt], output_lens=[1], description=f"a prompt of {len(prompt):,} tokens")


def _random_tokens(count: int, vocabulary: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    first = _FIRST_TOKEN if vocabulary > 2 * _FIRST_TOKEN else 0
    return [draw.randrange(first, vocabulary) for _ in range(count)]


def _fitting(case: Case, config: Mapping[str, Any]) -> Case:
    """Return the case; where a sequence is longer than the model's context, with a longer context."""
    context = config.get("max_position_embeddings")
    needed = max(len(prompt) + output for prompt, output in zip(case.work.prompts, case.work.output_lens, strict=True))
    if context is None or needed < context:
        return case
    longer = json.dumps({"max_position_embeddings": 1 << needed.bit_length()})
    return Case(
        name=case.name,
        work=case.work,
        options={**case.options, "json_model_override_args": longer},
        engines=case.engines,
        ranks=case.ranks,
    )
