"""Records that wait on disk."""

from __future__ import annotations

from sgl_batch.jobs.spool import Finished, Spool


def finished(index, failed=False):
    return Finished(index=index, record=b"%d\n" % index, failed=failed)


def test_the_file_is_made_on_first_use_and_removed_at_the_end(tmp_path):
    spool = Spool(tmp_path / "spool.db")
    assert spool.take(0) is None
    assert spool.take_first() is None
    assert list(tmp_path.iterdir()) == []
    spool.put(finished(5))
    assert (tmp_path / "spool.db").exists()
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_taken_once(tmp_path):
    spool = Spool(tmp_path / "spool.db")
    spool.put(finished(5, failed=True))
    spool.put(finished(3))
    assert spool.take(4) is None
    assert spool.take(5) == finished(5, failed=True)
    assert spool.take(5) is None
    assert spool.num_records == 1
    assert spool.take_first() == finished(3)
    assert spool.num_records == 0
    spool.close()
