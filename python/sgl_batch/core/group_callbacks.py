"""Owns the callbacks of a group of ranks: which one decides at a boundary, and what happens if its answer is wrong.

`action_checks` says which answers are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sgl_batch.core import long_tail, refill
from sgl_batch.core.action_checks import fault_of
from sgl_batch.core.actions import Actions
from sgl_batch.core.group_view import Callback, GroupView

ON_REFILL, ON_LONG_TAIL = "on_refill", "on_long_tail"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackFault:
    """A wrong answer of a user's callback. `callback`: ON_REFILL or ON_LONG_TAIL. `text`: its name, the action, why."""

    callback: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """What decides at the boundaries of a group of ranks.

    on_refill: decides where sequences wait that do not run.
    on_long_tail: decides where nothing waits on any rank.
    names: by ON_REFILL and ON_LONG_TAIL, the names under which a user gave them; the default has none.
    """

    on_refill: Callback = refill.on_refill
    on_long_tail: Callback = long_tail.on_long_tail
    names: Mapping[str, str] = field(default_factory=dict)

    def decide(self, view: GroupView) -> tuple[Actions, CallbackFault | None]:
        """Return the actions of a boundary and, if the callback's own were wrong and the default has decided, why.

        Where anything waits, partitions have ended already.
        """
        if not (view.waits or view.num_running):
            return (), None
        which = ON_REFILL if view.waits else ON_LONG_TAIL
        actions: Any = getattr(self, which)(view)
        why = fault_of(actions, view)
        if why is None:
            return actions, None
        assert which in self.names, f"the default {which} returned {actions}: {why}"
        text = f"{which} is {self.names[which]!r}, and it returned {why}; the default decides from now on"
        actions, fault = self.without(which).decide(view)
        assert fault is None, "the default is right"
        return actions, CallbackFault(callback=which, text=text)

    def without(self, which: str) -> Callbacks:
        """Return the callbacks with the default instead of this one."""
        default = refill.on_refill if which == ON_REFILL else long_tail.on_long_tail
        names = {name: given for name, given in self.names.items() if name != which}
        return replace(self, names=names, **{which: default})


BUILT_IN = Callbacks()
