"""What a NIXL agent knows of peers whose connection broke."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.lost_peers import Watched


class Agent:
    """A fake one: what goes to a broken peer fails."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self._made = 0
        self._peers: dict[int, str] = {}

    def prep_xfer_dlist(self, agent_name: str, descriptors: Any) -> int:
        self._made += 1
        self._peers[self._made] = agent_name
        return self._made

    def release_dlist_handle(self, handle: int) -> None:
        pass

    def make_prepped_xfer(self, operation: str, local: int, ids: list[int], remote: int, more: list[int]) -> int:
        self._made += 1
        self._peers[self._made] = self._peers[remote]
        return self._made

    def release_xfer_handle(self, handle: int) -> None:
        pass

    def transfer(self, handle: int) -> str:
        return self._to(self._peers[handle])

    def check_xfer_state(self, handle: int) -> str:
        return self._to(self._peers[handle])

    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None:
        self._to(remote_agent_name)

    def check_remote_metadata(self, agent: str) -> bool:
        return True

    def remove_remote_agent(self, agent: str) -> None:
        pass

    def _to(self, peer: str) -> str:
        if peer in self.broken:
            raise ConnectionError(peer)
        return "PROC"


def reading(agent: Watched, peer: str) -> int:
    local, remote = agent.prep_xfer_dlist("", []), agent.prep_xfer_dlist(peer, [])
    handle: int = agent.make_prepped_xfer("READ", local, [0], remote, [0])
    return handle


@pytest.mark.parametrize("how", ["transfer", "check_xfer_state", "send_notif"])
def test_a_peer_to_which_something_failed_is_lost_until_it_is_removed(how: str) -> None:
    agent = Watched(fake := Agent())
    handle = reading(agent, "p")
    assert agent.transfer(handle) == agent.check_xfer_state(handle) == "PROC"
    assert (agent.lost, agent.check_remote_metadata("p")) == (set(), True)
    fake.broken.add("p")
    with pytest.raises(ConnectionError):
        if how == "send_notif":
            agent.send_notif("p", notif_msg=b"x")
        else:
            getattr(agent, how)(handle)
    assert (agent.lost, agent.check_remote_metadata("p"), agent.check_remote_metadata("q")) == ({"p"}, False, True)
    agent.remove_remote_agent("p")
    assert (agent.lost, agent.check_remote_metadata("p")) == (set(), True)


def test_a_peer_is_busy_while_a_transfer_with_it_is_not_released() -> None:
    agent = Watched(Agent())
    one, two = reading(agent, "p"), reading(agent, "p")
    agent.release_xfer_handle(one)
    assert (agent.busy("p"), agent.busy("q")) == (True, False)
    agent.release_xfer_handle(two)
    assert agent.busy("p") is False
