"""Which requests a step holds: prefill of one, or decodes; nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from baton.engine.static.steps import Awaits, Kind, MixedStep, Phase, Seen, Step, choose, kind_of, phase_of


def seen(*kinds: Kind) -> list[Seen]:
    """Requests named by their place: r0, r1, ..."""
    return [Seen(f"r{index}", kind) for index, kind in enumerate(kinds)]


def step(requests: Sequence[Seen], **given: Any) -> Step:
    return choose(requests, **{"streak": 0, "limit": 2, "room": True, "fits": True, "decode_first": False, **given})


def test_a_prompt_starts_alone_while_decodes_are_hidden() -> None:
    chosen = step(seen(Kind.DECODE, Kind.DECODE, Kind.PROMPT, Kind.PROMPT))
    assert (chosen.phase, chosen.admit, chosen.starves) == (Phase.PREFILL, 1, True)
    # vLLM admits the first that it can: the order is theirs.
    assert chosen.shown == {"r2", "r3"}


def test_a_prompt_that_was_begun_goes_on_before_others_start() -> None:
    chosen = step(seen(Kind.DECODE, Kind.CHUNK, Kind.PROMPT))
    assert (chosen.phase, chosen.shown, chosen.admit) == (Phase.PREFILL, {"r1"}, 0)


def test_only_the_first_of_two_begun_prompts_goes_on() -> None:
    assert step(seen(Kind.CHUNK, Kind.CHUNK)).shown == {"r0"}


def test_decodes_run_together_with_those_whose_cache_has_come() -> None:
    chosen = step(seen(Kind.DECODE, Kind.DECODE, Kind.LOADED))
    assert (chosen.phase, chosen.shown, chosen.defer_prompts) == (Phase.DECODE, {"r0", "r1", "r2"}, True)


def test_an_arriving_transfer_starts_in_a_decode_step_and_costs_none() -> None:
    chosen = step(seen(Kind.DECODE, Kind.ASK))
    assert (chosen.phase, chosen.shown, chosen.starves) == (Phase.DECODE, {"r0", "r1"}, False)


def test_what_may_turn_out_a_prompt_is_not_shown_beside_the_first_decodes() -> None:
    # vLLM would not defer it: no decode runs yet.
    chosen = step(seen(Kind.LOADED, Kind.ASK))
    assert (chosen.phase, chosen.shown, chosen.defer_prompts) == (Phase.DECODE, {"r0"}, False)


def test_an_arriving_transfer_on_an_idle_engine_starts_at_once() -> None:
    assert step(seen(Kind.ASK)).shown == {"r0"}
    assert step(seen(Kind.ASK)).admit == 1


def test_decodes_have_their_turn_after_so_many_prefill_steps() -> None:
    busy = seen(Kind.DECODE, Kind.CHUNK, Kind.PROMPT)
    assert [step(busy, streak=streak).phase for streak in (0, 1, 2)] == [Phase.PREFILL, Phase.PREFILL, Phase.DECODE]


def test_a_prompt_under_way_may_be_preempted_for_the_decodes() -> None:
    assert step(seen(Kind.DECODE, Kind.CHUNK), streak=2).shown == {"r0", "r1"}


def test_without_room_prompts_wait_and_decodes_go_on() -> None:
    chosen = step(seen(Kind.DECODE, Kind.PROMPT), room=False)
    assert (chosen.phase, chosen.shown) == (Phase.DECODE, {"r0"})


def test_a_prompt_that_found_no_blocks_does_not_hold_decodes_up() -> None:
    assert step(seen(Kind.DECODE, Kind.PROMPT), fits=False).phase is Phase.DECODE
    assert step(seen(Kind.PROMPT), fits=False).phase is Phase.PREFILL


def test_ranks_that_balance_their_prompts_decode_meanwhile() -> None:
    assert step(seen(Kind.DECODE, Kind.PROMPT), decode_first=True).phase is Phase.DECODE
    assert step(seen(Kind.PROMPT), decode_first=True).phase is Phase.PREFILL


def test_nothing_to_do_shows_nobody() -> None:
    assert step(seen(Kind.BLOCKED)) == Step(Phase.IDLE, frozenset(), admit=0)
    assert step([]).phase is Phase.IDLE


def test_of_any_requests_no_step_holds_both_phases_and_decodes_wait_no_longer_than_the_limit() -> None:
    chance = random.Random(3)
    for _ in range(2000):
        requests = seen(*chance.choices(list(Kind), k=chance.randrange(8)))
        kinds = {request.id: request.kind for request in requests}
        for streak in (0, 5):
            chosen = step(requests, streak=streak, limit=5, room=chance.random() < 0.8)
            shown = {kinds[name] for name in chosen.shown}
            if chosen.phase is Phase.PREFILL:
                assert not shown & {Kind.DECODE, Kind.LOADED}
                assert chosen.admit == (0 if Kind.CHUNK in shown else 1)
            else:
                # What could turn out to be a prompt is only shown when vLLM defers prompts.
                assert chosen.defer_prompts or not shown & {Kind.CHUNK, Kind.ASK, Kind.PROMPT}
                assert Kind.PROMPT not in shown
            if streak == 5 and Kind.DECODE in kinds.values():
                assert chosen.phase is Phase.DECODE
                assert {name for name, kind in kinds.items() if kind is Kind.DECODE} <= chosen.shown


STANDS: dict[str, Any] = {
    "running": False,
    "in_prompt": False,
    "awaits": Awaits.NOTHING,
    "computed": 0,
    "total": 50,
    "asks": False,
}


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, Kind.PROMPT),
        ({"running": True, "computed": 49}, Kind.DECODE),
        ({"running": True, "in_prompt": True, "computed": 49}, Kind.CHUNK),  # one token of the prompt is left
        ({"asks": True}, Kind.ASK),
        ({"asks": True, "awaits": Awaits.EVENT, "computed": 50}, Kind.BLOCKED),  # under way
        ({"asks": True, "computed": 50}, Kind.LOADED),
        ({"computed": 49}, Kind.LOADED),
        ({"computed": 32}, Kind.PROMPT),  # the rest failed to come, and is computed
        ({"awaits": Awaits.EVENT}, Kind.BLOCKED),
        ({"awaits": Awaits.ITS_END}, Kind.ASK),
    ],
)
def test_where_a_request_stands_is_read_off_its_state(given: dict[str, Any], kind: Kind) -> None:
    assert kind_of(**{**STANDS, **given}) is kind


def test_a_mixed_step_is_an_error_that_names_its_requests() -> None:
    with pytest.raises(MixedStep, match=r"prefill of long \(64 tokens\) and decode of a \(1 tokens\), b \(1 tokens\)"):
        phase_of({"a": 1, "long": 64, "b": 1}, ["long"])
    with pytest.raises(MixedStep, match=r"prefill of x \(8 tokens\), y \(9 tokens\) and decode of none"):
        phase_of({"x": 8, "y": 9}, ["x", "y"])


def test_a_step_is_what_its_requests_are() -> None:
    assert phase_of({}, []) is Phase.IDLE
    assert phase_of({"a": 1, "b": 1}, []) is Phase.DECODE
    assert phase_of({"a": 1}, ["a"]) is Phase.PREFILL
