"""The seed of a line: it never changes, differs between lines, and follows its rule."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_batch.jobs.seeds import MAX_JOB_SEED, SEED_RULE, line_seed

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(st.integers(0, MAX_JOB_SEED), st.integers(0, 2**40))
def test_the_seed_follows_the_rule_that_manifests_state(job_seed, index):
    scope = {"J": job_seed.to_bytes(8, "little"), "I": index.to_bytes(8, "little"), "blake2b": blake2b}
    expression = SEED_RULE[SEED_RULE.index("int.from_bytes") : SEED_RULE.index(", where")]
    assert line_seed(job_seed, index) == eval(expression, scope)


@pytest.mark.parametrize(("job_seed", "index", "seed"), [(0, 0, 1519898957), (0, 1, 1461440302), (7, 0, 1976880536)])
def test_seeds_never_change_between_versions(job_seed, index, seed):
    assert line_seed(job_seed, index) == seed


def test_neighbours_have_different_seeds():
    assert len({line_seed(job, index) for job in range(10) for index in range(1000)}) > 9990
