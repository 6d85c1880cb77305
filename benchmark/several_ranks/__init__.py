"""What ranks.py measures: workloads, the variant of a checkpoint, single runs, and what their counters say."""
