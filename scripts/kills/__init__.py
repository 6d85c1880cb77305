"""Kills a server's processes while jobs run; run it through scripts/kill_harness."""
