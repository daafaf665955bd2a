"""What a hand-off says on the wire, for whoever does one: the proxy, and the launcher's doctor. Values only, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TICKET_KEY = "kv_transfer_params"
"""vLLM's name for the ticket."""

ASK: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a prefill leg carries in the ticket's place: the wish for one (docs/concepts.md, step 3)."""


def push_params(
    engine_id: str, host: str, port: int, request_id: str, *, tp_size: int = 1, pp_size: int = 1
) -> dict[str, Any]:
    """A decode leg's ticket in write mode, which can be told before prefill has answered.

    Args:
        engine_id: of the rank that will push.
        host, port: of that rank's side channel.
        request_id: of both legs. P finds the request by the leg's own id; that this key is there at all is what vLLM
            asks for (0.32, nixl/metadata.py, ``add_new_req_to_recv``).
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": tp_size,
        "pp_size": pp_size,
        "transfer_mode": "push",
    }
