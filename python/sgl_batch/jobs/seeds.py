"""Decides the seed of a request line that has none."""

from __future__ import annotations

from hashlib import blake2b

MAX_JOB_SEED = 2**63 - 1
_PERSON = b"sgl_batch.seed.1"

SEED_RULE = (
    "A line whose body has no seed (or null) gets int.from_bytes(blake2b(J + I, digest_size=8, "
    "person=b'sgl_batch.seed.1').digest(), 'little') & 0x7FFFFFFF, where J is the job seed and I the line's "
    "index, each as 8 bytes, little-endian; the index counts the input's lines that are not blank, from 0. "
    "A seed given in a line is left as it is."
)


def line_seed(job_seed: int, index: int) -> int:
    """Return the seed (0 .. 2**31 - 1) of the line at `index` in a job, by SEED_RULE.

    It depends on its two arguments alone, so neither order nor batch changes it.
    """
    assert 0 <= job_seed <= MAX_JOB_SEED, f"job seed {job_seed} outside 0..{MAX_JOB_SEED}"
    counter = job_seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(counter, digest_size=8, person=_PERSON).digest(), "little") & 0x7FFFFFFF
