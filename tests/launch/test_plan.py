from __future__ import annotations

import pytest

from baton.cluster import Role
from baton.launch import LaunchError, PlanRequest, plan, share_cpus
from baton.launch.ports import port_owners


def test_one_of_each_on_the_fields_ports() -> None:
    cluster = plan(PlanRequest(model="m", cpus=(0, 1)))
    assert [(each.id, each.port, each.side_channel_port, each.cpus) for each in cluster.instances] == [
        ("P0", 8100, 5559, (0,)),
        ("D0", 8200, 5659, (1,)),
    ]
    assert cluster.proxy_port == 8000


@pytest.mark.parametrize("prefill", [1, 2, 5])
@pytest.mark.parametrize("decode", [1, 3, 7])
def test_no_port_has_two_owners(prefill: int, decode: int) -> None:
    cluster = plan(PlanRequest(model="m", prefill=prefill, decode=decode, cpus=tuple(range(8))))
    assert len(port_owners(cluster)) == 1 + 2 * (prefill + decode)
    assert len(cluster.of_role(Role.PREFILL)) == prefill


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefill_port": 8000}, "port 8000 is planned for the proxy and for P0's API"),
        ({"decode_side_port": 5559}, "port 5559 is planned for P0's side channel and for D0's side channel"),
        ({"prefill": 101, "decode": 1}, "8200 is planned for P100's API and for D0's API"),
        ({"decode_port": 65535, "decode": 2}, "port 65536 for D1's API is not a port number"),
        ({"prefill": 0}, "--prefill 0: a cluster needs at least one"),
    ],
)
def test_a_collision_names_both_owners(options: dict[str, int], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        plan(PlanRequest(model="m", **options))  # type: ignore[arg-type]


def test_every_data_parallel_rank_has_a_side_channel_of_its_own() -> None:
    cluster = plan(PlanRequest(model="m", decode=2, decode_args=("--data-parallel-size", "2")))
    assert [each.side_channel_port for each in cluster.of_role(Role.DECODE)] == [5659, 5661]
    assert port_owners(cluster)["localhost", 5662] == "D1's side channel of rank 1"
    with pytest.raises(LaunchError, match="5659 is planned for P0's side channel of rank 1 and for D0's side channel"):
        plan(PlanRequest(model="m", prefill_side_port=5658, prefill_args=("-dp", "2")))
    with pytest.raises(LaunchError, match="port 65536 for D0's side channel of rank 1 is not a port number"):
        plan(PlanRequest(model="m", decode_side_port=65535, decode_args=("-dp", "2")))


def test_role_flags_go_to_their_role_only() -> None:
    cluster = plan(PlanRequest(model="m", common_args=("--c",), prefill_args=("--p",), decode_args=("--d",)))
    assert [each.engine_args for each in cluster.instances] == [("--c", "--p"), ("--c", "--d")]


@pytest.mark.parametrize(
    ("cpus", "engines", "shares"),
    [
        ((0, 1), 2, [(0,), (1,)]),
        ((0, 1, 2, 3, 4), 2, [(0, 1, 2), (3, 4)]),
        ((4, 6), 3, [(4,), (6,), (4,)]),
        ((0,), 1, [(0,)]),
    ],
)
def test_cores_are_shared_evenly(cpus: tuple[int, ...], engines: int, shares: list[tuple[int, ...]]) -> None:
    assert share_cpus(cpus, engines) == shares
