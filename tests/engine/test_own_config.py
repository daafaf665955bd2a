"""One set of keys out of two names."""

from __future__ import annotations

import pytest

from baton.engine.own_config import own_config


def test_keys_of_both_names_are_one_set() -> None:
    given = {"neuron_config": {"a": 1, "b": [2]}, "baton_config": {"b": [2], "c": None}, "other": {"d": 4}}
    assert own_config(given) == {"a": 1, "b": [2], "c": None}


def test_nothing_said_is_nothing() -> None:
    assert own_config({}) == {}
    assert own_config({"neuron_config": None}) == {}


def test_two_values_for_one_key_are_named() -> None:
    with pytest.raises(ValueError, match=r"a is 1 in neuron_config and 2 in baton_config"):
        own_config({"neuron_config": {"a": 1}, "baton_config": {"a": 2}})


@pytest.mark.parametrize("wrong", [[], "x", 1])
def test_what_is_no_object_is_named(wrong: object) -> None:
    with pytest.raises(ValueError, match="baton_config in --additional-config is"):
        own_config({"baton_config": wrong})
