"""Begins a fork server's imports: without the garbage collector. The server imports this module first."""

from __future__ import annotations

import gc

gc.disable()
