"""Owns what a profile says: samples of passes and of whole steps, rates of copies, and what machine they are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sgl_batch.errors import ConfigError

FORMAT = "sgl_batch.profile/1"
# Other programs on more of the cores than this make a profile slower than the machine is.
_BUSY_SHARE = 1 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSample:
    """Seconds of a forward pass of one group through `layers` layers of a kind, without logits' sampling.

    Attributes:
        decode: Whether the pass is a decode step.
        sequences: Sequences of the group.
        tokens: Of each prompt, or the context that each decoding sequence has before the step.
        kind: "dense" or "moe".
        layers: How many layers ran.
        attention_s, router_s, experts_s: Of all these layers. A dense layer's MLP is its experts.
        rest_s: Embedding, last norm, logits, and what launching a pass takes.
    """

    decode: bool
    sequences: int
    tokens: int
    kind: str
    layers: int
    attention_s: float
    router_s: float
    experts_s: float
    rest_s: float

    @property
    def rows(self) -> int:
        """Return the rows of the pass."""
        return self.sequences if self.decode else self.sequences * self.tokens

    @property
    def total_s(self) -> float:
        """Return the seconds of the whole pass."""
        return self.attention_s + self.router_s + self.experts_s + self.rest_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """Seconds that an engine of the cut model takes for a step beside attention, router and experts.

    It is all that surrounds the layers: scheduling, logits, sampling, messages between processes.

    Attributes:
        decode: Whether it is of a decode step; else of a prefill group with the intake of its requests.
        rows: Sequences of the step.
        tokens: Prompt tokens of the step; 0 in a decode step.
        seconds: Of one step.
    """

    decode: bool
    rows: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model's profile on a machine.

    Attributes:
        machine: What the numbers hold for; another value refuses them.
        made: When, as text.
        took_s: Seconds of the measurement.
        load: Cores that other programs kept busy while layers were measured, on average.
        passes, steps: The samples.
        rates: Bytes a second by name: "copy" between device and store, "disk" of the checkpoint's files, "new memory"
            that is written for the first time.
    """

    machine: Mapping[str, Any]
    made: str
    took_s: float
    load: float
    passes: tuple[PassSample, ...]
    steps: tuple[StepSample, ...]
    rates: Mapping[str, float]

    @property
    def was_disturbed(self) -> bool:
        """Return whether other programs worked so much meanwhile that the profile is slower than the machine."""
        return self.load > _BUSY_SHARE * int(self.machine["cores"])

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as its file holds it."""
        return {"format": FORMAT, **asdict(self)}


def profile_of(content: Any, name: str) -> Profile:
    """Read a profile from what its file holds. Raises ConfigError, with the file's `name`, for anything else."""
    try:
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
        given = {field.name: content[field.name] for field in fields(Profile)}
        passes = tuple(PassSample(**one) for one in given.pop("passes"))
        steps = tuple(StepSample(**one) for one in given.pop("steps"))
        if not passes:
            raise ValueError("it has no samples")
        return Profile(**given, passes=passes, steps=steps)
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{name} is no profile: {error}; make one with sgl-batch plan --profile") from error


def check_machine(profile: Profile, here: Mapping[str, Any]) -> None:
    """Refuse a profile of another machine, model or version. Raises ConfigError that names the first difference."""
    for name in dict.fromkeys((*profile.machine, *here)):
        there, now = profile.machine.get(name), here.get(name)
        if there != now:
            raise ConfigError(
                f"the profile is of another {name.replace('_', ' ')} ({there}; here {now}): make one here with "
                "sgl-batch plan --profile"
            )
