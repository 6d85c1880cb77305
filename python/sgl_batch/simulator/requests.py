"""Owns the sequences of a simulation, as arrays by number, and the queue of a rank as a view that decisions read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_batch.core.sequence import SequenceState

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What will be generated, by number of the sequence.

    Attributes:
        prompts: Tokens of each prompt.
        outputs: Tokens that each sequence will generate. No decision sees them.
        most: The most tokens that each may generate, by which decisions reserve.
    """

    prompts: Numbers
    outputs: Numbers
    most: Numbers

    def __len__(self) -> int:
        return len(self.prompts)

    def every(self, count: int) -> Requests:
        """Return every `count`-th request, beginning with the first, under new numbers."""
        return Requests(prompts=self.prompts[::count], outputs=self.outputs[::count], most=self.most[::count])

    def sequence(self, number: int) -> SequenceState:
        """Return the sequence of a number, QUEUED. Its id is the number, and it arrives by number."""
        return SequenceState(
            sequence_id=str(number),
            arrival=number,
            prompt_tokens=int(self.prompts[number]),
            max_new_tokens=int(self.most[number]),
        )


class RankQueue(Sequence[SequenceState]):
    """The queued sequences of a rank. Those that a decision has read are kept as states, all others are numbers.

    `tokens`: of all queued prompts together.
    """

    def __init__(self, requests: Requests, numbers: Iterable[int] = ()) -> None:
        self._requests, self._numbers = requests, deque(numbers)
        self._states: dict[int, SequenceState] = {}
        self.tokens = int(requests.prompts[list(self._numbers)].sum()) if self._numbers else 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[SequenceState]:
        for number in self._numbers:
            yield self._state(number)

    def __getitem__(self, index: Any) -> Any:
        return self._state(self._numbers[index])

    def of_prompt(self, group: str) -> list[SequenceState]:
        """Return nothing: no sequence shares its prompt with another."""
        return []

    def add(self, number: int) -> None:
        """Queue a sequence behind all others."""
        self._numbers.append(number)
        self.tokens += int(self._requests.prompts[number])

    def give(self, count: int) -> list[int]:
        """Remove so many sequences from behind, of which none has KV, and return their numbers; none for no count."""
        given = [self._numbers.pop() for _ in range(count)]
        for number in given:
            self._states.pop(number, None)
            self.tokens -= int(self._requests.prompts[number])
        return given

    def add_again(self, sequence: SequenceState, *, last: bool) -> None:
        """Queue a sequence that has lost its KV, behind all others or before them."""
        number = int(sequence.sequence_id)
        self._states[number] = sequence
        self._numbers.append(number) if last else self._numbers.appendleft(number)
        self.tokens += sequence.prompt_tokens

    def take(self, sequence: SequenceState) -> None:
        """Remove a sequence, in most cases the first."""
        number = int(sequence.sequence_id)
        if self._numbers[0] == number:
            self._numbers.popleft()
        else:
            self._numbers.remove(number)
        self._states.pop(number, None)
        self.tokens -= sequence.prompt_tokens

    def _state(self, number: int) -> SequenceState:
        if number not in self._states:
            self._states[number] = self._requests.sequence(number)
        return self._states[number]
