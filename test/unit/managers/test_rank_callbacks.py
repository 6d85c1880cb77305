"""The functions that decide for several ranks are found by their names."""

from __future__ import annotations

import pytest

from sgl_batch.config import RankConfig, from_mapping
from sgl_batch.core import long_tail, refill
from sgl_batch.core.group_callbacks import BUILT_IN
from sgl_batch.errors import ConfigError
from sgl_batch.managers.rank_callbacks import callbacks_of
from sgl_batch.startup.argument_checks import check_callbacks

LEVEL = "sgl_batch.core.long_tail:hold_level"


def test_without_names_the_defaults_decide():
    assert callbacks_of(RankConfig()) == BUILT_IN


def test_what_is_named_decides_and_the_other_stays_the_default():
    found = callbacks_of(RankConfig(on_long_tail=LEVEL))
    assert (found.on_refill, found.on_long_tail) == (refill.on_refill, long_tail.hold_level)
    assert found.names == {"on_long_tail": LEVEL}


def test_a_name_of_no_function_is_refused():
    with pytest.raises(ConfigError, match=r"on_refill is 'math:pi', and .* name a function of a view of all ranks"):
        callbacks_of(RankConfig(on_refill="math:pi"))


@pytest.mark.parametrize("flag", ["on_refill", "on_long_tail"])
def test_a_name_that_is_not_module_and_name_is_refused_at_once(flag):
    with pytest.raises(ConfigError, match=f"{flag} is 'callbacks'; it takes module:name, as in my_callbacks:{flag}"):
        from_mapping({flag: "callbacks"})


def test_a_callback_beside_moves_of_every_sequence_is_refused():
    with pytest.raises(ConfigError, match="on_long_tail is 'a:b', and migration is 'always'"):
        check_callbacks(RankConfig(on_long_tail="a:b", migration="always"), num_ranks=2)


def test_a_callback_for_several_ranks_is_refused_on_one():
    check_callbacks(RankConfig(on_long_tail=LEVEL), num_ranks=2)
    check_callbacks(RankConfig(), num_ranks=1)
    with pytest.raises(ConfigError, match=r"on_long_tail is '.*:hold_level', and the engine has one rank"):
        check_callbacks(RankConfig(on_long_tail=LEVEL), num_ranks=1)
