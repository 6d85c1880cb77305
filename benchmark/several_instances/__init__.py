"""What benchmark/instances.py runs, disturbs and draws."""
