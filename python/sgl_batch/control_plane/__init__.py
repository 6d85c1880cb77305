"""Runs engines on many machines, by Ray: `instances` behind one job API, and `data` as a stage of Ray Data.

Ray is imported here alone (the extra `ray`).
"""
