"""The set of used custom_ids."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_batch.jobs.seen_ids import SeenIds

# No deadline: a busy machine is no fault of the code.
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(st.lists(st.text(max_size=2)))
def test_a_claim_returns_the_first_line_that_used_the_id(tmp_path_factory, ids):
    seen = SeenIds(tmp_path_factory.mktemp("seen") / "seen.db")
    first: dict[str, int] = {}
    for line, custom_id in enumerate(ids, start=1):
        assert seen.claim(custom_id, line) == first.get(custom_id)
        first.setdefault(custom_id, line)
    seen.close()


def test_closing_removes_the_file(tmp_path):
    seen = SeenIds(tmp_path / "seen.db")
    seen.claim("a", 1)
    assert list(tmp_path.iterdir()) == [tmp_path / "seen.db"]
    seen.close()
    assert list(tmp_path.iterdir()) == []
