"""Owns modelled time: runs of engines whose decisions are those of core/, and whose passes cost what a model says."""
