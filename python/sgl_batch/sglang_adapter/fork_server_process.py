"""Prepares a fork server's process for its children. The server imports this module last."""

from __future__ import annotations

import gc

# The collector would write to every object that it visits, and so copy the memory that is shared with the children.
gc.freeze()
gc.enable()
