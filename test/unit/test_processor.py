"""The processor is the first of /proc/cpuinfo, or unknown."""

from __future__ import annotations

from pathlib import Path

from sgl_batch.processor import Processor, read_processor


def test_the_first_processor_is_read_with_its_flags(tmp_path: Path) -> None:
    assert read_processor(tmp_path) == Processor(name=None, flags=frozenset())
    (tmp_path / "proc").mkdir()
    text = (
        "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nmodel name\t: B\nflags\t\t: fpu\n"
    )
    (tmp_path / "proc" / "cpuinfo").write_text(text)
    assert read_processor(tmp_path) == Processor(name="A CPU", flags=frozenset({"fpu", "avx2"}))
