"""First in, first out: the fair default. It looks at nothing but the order of arrival."""

from sgl_batch.core.sequence import Sequence


class FifoOrder:
    """Sequences go in order of arrival (BatchGen 5.3: refill candidates are taken first-in first-out)."""

    def key(self, sequence: Sequence) -> tuple[int, ...]:
        return (sequence.arrival,)
