"""What other programs do meanwhile counts; this process and its children do not."""

from __future__ import annotations

import subprocess
import sys
import time

from sgl_batch.profiler.other_load import OtherLoad

BURN = "import time\nends = time.process_time() + {}\nwhile time.process_time() < ends: pass"


def test_the_work_of_this_process_and_of_its_ended_children_is_not_that_of_others():
    alone, both = OtherLoad(), OtherLoad()
    subprocess.run([sys.executable, "-c", BURN.format(0.5)], check=True)
    own_s = time.process_time() + 0.5
    while time.process_time() < own_s:
        pass
    without = both.cores()
    # A child that has not ended counts with the others, as another program does.
    running = subprocess.Popen([sys.executable, "-c", BURN.format(60)])
    try:
        time.sleep(2)
        assert alone.cores() > without
    finally:
        running.kill()
        running.wait()
