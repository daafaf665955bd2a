"""Peers whose connection broke, by a cable or a host that went: found out, and met anew.

When UCX gives a connection up, every transfer and notice to that peer fails from then on, also once the network is
back: the connection is made anew only when the peer's metadata is loaded again. vLLM (0.32, nixl/base_worker.py,
``_cleanup_remote_engines``) does so in read mode when NIXL has dropped the metadata, which NIXL 1.5.1 does not do by
itself when a connection breaks, and never in write mode: such a pair stays broken until one of the two starts anew.
This can go when a pair in ``tests/e2e/test_hosts.py`` comes back without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class Watched:
    """A NIXL agent that knows which peers it has lost; may be used from several threads.

    Attributes:
        lost: agents, by name, to which a transfer or a notice has failed since they were added.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.lost: set[str] = set()
        # whose memory a list of descriptors is, and to whom a transfer goes, by their handles
        self._owners: dict[Any, str] = {}
        self._open: dict[Any, str | None] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def busy(self, peer: str) -> bool:
        """Whether a transfer with *peer* was not released yet."""
        return peer in list(self._open.values())

    def prep_xfer_dlist(self, agent_name: str, *args: Any, **more: Any) -> Any:
        handle = self._agent.prep_xfer_dlist(agent_name, *args, **more)
        self._owners[handle] = agent_name
        return handle

    def release_dlist_handle(self, handle: Any) -> Any:
        self._owners.pop(handle, None)
        return self._agent.release_dlist_handle(handle)

    def make_prepped_xfer(
        self, operation: str, local: Any, local_ids: Any, remote: Any, *args: Any, **more: Any
    ) -> Any:
        handle = self._agent.make_prepped_xfer(operation, local, local_ids, remote, *args, **more)
        self._open[handle] = self._owners.get(remote)
        return handle

    def release_xfer_handle(self, handle: Any) -> Any:
        released = self._agent.release_xfer_handle(handle)
        self._open.pop(handle, None)
        return released

    def transfer(self, handle: Any, *args: Any, **more: Any) -> Any:
        with self._noticing(self._open.get(handle)):
            return self._agent.transfer(handle, *args, **more)

    def check_xfer_state(self, handle: Any) -> Any:
        with self._noticing(self._open.get(handle)):
            return self._agent.check_xfer_state(handle)

    def send_notif(self, remote_agent_name: str, *args: Any, **more: Any) -> Any:
        with self._noticing(remote_agent_name):
            return self._agent.send_notif(remote_agent_name, *args, **more)

    def check_remote_metadata(self, agent: str, *args: Any, **more: Any) -> bool:
        """Whether *agent* can be reached with what is known of it."""
        return agent not in self.lost and bool(self._agent.check_remote_metadata(agent, *args, **more))

    def remove_remote_agent(self, agent: str) -> Any:
        self.lost.discard(agent)
        return self._agent.remove_remote_agent(agent)

    @contextlib.contextmanager
    def _noticing(self, peer: str | None) -> Iterator[None]:
        try:
            yield
        except Exception:
            if peer is not None:
                self.lost.add(peer)
            raise
