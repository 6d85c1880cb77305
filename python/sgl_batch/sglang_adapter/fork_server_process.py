"""Imported by a fork server after everything that its children need; it prepares the server's process for them."""

from __future__ import annotations

import gc

# The collector would write to every object that it looks at, and so copy the memory that is shared with the children.
gc.freeze()
