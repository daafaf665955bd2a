from __future__ import annotations

import json
from typing import Any

import pytest

from baton.cluster import Role, TransferMode
from baton.proxy.engine_info import BadEngineInfo, EngineInfo, disagreement
from baton.proxy.ticket import push_ticket
from tests.proxy.push_fakes import about

READ, WRITE = TransferMode.READ, TransferMode.WRITE


def parsed(**more: Any) -> EngineInfo | None:
    return EngineInfo.parse(json.dumps({**about("e", "kv_producer"), **more}).encode())


def info(**more: Any) -> EngineInfo:
    found = parsed(**more)
    assert found is not None
    return found


def test_vllms_words_are_our_modes() -> None:
    assert info(transfer_mode="push").transfer_mode is WRITE
    assert info(transfer_mode="pull").transfer_mode is READ


def test_an_engine_without_a_connector_moves_nothing() -> None:
    assert EngineInfo.parse(b'{"transfer_mode": null}') is None


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{}", "it is no object with a transfer_mode"),
        (b"[]", "it is no object with a transfer_mode"),
        (b"<html>", "it is not JSON"),
        (b'{"transfer_mode": "shout"}', "transfer_mode is 'shout', neither 'pull' nor 'push'"),
        (b'{"transfer_mode": ["push"]}', "transfer_mode is ['push'], neither 'pull' nor 'push'"),
        (b'{"transfer_mode": "push", "engine_id": 7}', "engine_id is 7, not a text"),
        (b'{"transfer_mode": "push", "engine_id": ""}', "engine_id is '', not a text"),
        (
            b'{"transfer_mode": "push", "engine_id": "e", "side_channel_host": "h", "side_channel_port": "5"}',
            "side_channel_port is '5', not a number from 1 to 65535",
        ),
        (
            b'{"transfer_mode": "push", "engine_id": "e", "side_channel_host": "h", "side_channel_port": true}',
            "side_channel_port is True, not a number from 1 to 65535",
        ),
        (
            b'{"transfer_mode":"push","engine_id":"e","side_channel_host":"h","side_channel_port":5,"tp_size":0}',
            "tp_size is 0, not a number from 1 to 65535",
        ),
    ],
)
def test_what_cannot_be_is_named(raw: bytes, said: str) -> None:
    with pytest.raises(BadEngineInfo) as caught:
        EngineInfo.parse(raw)
    assert str(caught.value) == said


def test_keys_of_later_versions_are_passed_over() -> None:
    assert info(later="key") == info()


def test_a_ticket_says_what_a_stock_engine_is() -> None:
    params = {
        "remote_engine_id": "s",
        "remote_host": "h",
        "remote_port": 5600,
        "tp_size": 2,
        "pp_size": None,
        "transfer_mode": "push",
    }
    assert EngineInfo.from_ticket(params) == EngineInfo("s", WRITE, "h", 5600, 2)
    # before there was write mode no ticket named it
    del params["transfer_mode"]
    assert EngineInfo.from_ticket(params) == EngineInfo("s", READ, "h", 5600, 2)


@pytest.mark.parametrize(
    "wrong", [{"remote_engine_id": None}, {"remote_port": "x"}, {"transfer_mode": "?"}, {"transfer_mode": ["push"]}]
)
def test_a_ticket_that_says_too_little_says_nothing(wrong: dict[str, Any]) -> None:
    assert EngineInfo.from_ticket({"remote_engine_id": "s", "remote_host": "h", "remote_port": 5600, **wrong}) is None


def test_the_ranks_of_an_engine_are_the_engine() -> None:
    assert info().names("e")
    assert info(dp_size=2).names("e_dp1")
    assert info(engine_id="e_dp0").names("e_dp1")
    assert not info().names("f")
    assert not info().names(None)


def test_a_role_is_misplaced_only_in_the_other_pool() -> None:
    assert not info(role="kv_producer").misplaced(Role.PREFILL)
    assert info(role="kv_producer").misplaced(Role.DECODE)
    assert not info(role="kv_both").misplaced(Role.DECODE)
    assert not info(role=None).misplaced(Role.DECODE)


@pytest.mark.parametrize(
    ("modes", "wanted", "said"),
    [
        ({}, None, None),
        ({"P0": READ, "D0": READ}, None, None),
        ({"P0": WRITE, "D0": WRITE}, WRITE, None),
        (
            {"P0": READ, "D0": WRITE},
            None,
            "the engines differ in transfer mode (P0 read, D0 write): start all of them with the same --transfer-mode",
        ),
        ({"P0": READ, "D0": READ}, WRITE, "write mode was asked for, but these are in another: P0, D0"),
        ({"P0": READ, "D0": WRITE}, READ, "read mode was asked for, but these are in another: D0"),
    ],
)
def test_who_differs_is_named(modes: dict[str, TransferMode], wanted: TransferMode | None, said: str | None) -> None:
    assert disagreement(modes, wanted) == said


def test_a_push_ticket_says_where_the_kv_cache_will_come_from() -> None:
    ticket = push_ticket(info(tp_size=2, pp_size=3), 0, "id", 5.0)
    assert ticket.params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "e",
        "remote_request_id": "id",
        "remote_host": "127.0.0.1",
        "remote_port": 5559,
        "tp_size": 2,
        "pp_size": 3,
        "transfer_mode": "push",
    }
    assert ticket.given_at == 5.0


def test_a_push_ticket_of_a_rank_names_its_engine_and_its_port() -> None:
    ticket = push_ticket(info(dp_size=4), 3, "id", 5.0)
    assert ticket.engine_id == "e_dp3"
    assert ticket.params["remote_port"] == 5562
