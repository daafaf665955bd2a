"""What a user says to Baton's engine inside vLLM's ``--additional-config``.

It stands under ``neuron_config``, as on Trainium, or under its device-neutral twin ``baton_config``; keys may be spread
over both, but one key may not have two values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = ("neuron_config", "baton_config")


def own_config(additional_config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both objects as one; empty when there is neither.

    Raises:
        ValueError: one of them is no object, or a key has another value in each.
    """
    made: dict[str, Any] = {}
    for name in NAMES:
        given = additional_config.get(name)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise ValueError(
                f"{name} in --additional-config is {given!r}: it must be an object, as in {{{name!r}: {{}}}}"
            )
        for key, value in given.items():
            if key in made and made[key] != value:
                raise ValueError(
                    f"{key} is {made[key]!r} in {NAMES[0]} and {value!r} in {name}: give it once, in either of them"
                )
            made[key] = value
    return made
