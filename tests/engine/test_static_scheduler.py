"""The scheduler of static shapes on vLLM's own, without a model: steps hold one phase, and everybody ends."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

BLOCK, TOKENS = 32, 64


def scheduler(blocks: int = 200, *, ahead: bool = False, **config: Any) -> Any:
    """A scheduler with a connector; *ahead*: the one for engines that schedule a step ahead."""
    import torch
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from baton.engine.static.scheduler import StaticAsyncScheduler, StaticScheduler

    made = EngineArgs(
        model=str(Path(__file__).parent / "tiny"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=BLOCK,
        max_num_seqs=4,
        max_num_batched_tokens=TOKENS,
        max_model_len=256,
        enable_prefix_caching=False,
        additional_config={"baton_config": config},
        kv_transfer_config=KVTransferConfig(
            kv_connector="FakeConnector",
            kv_connector_module_path="tests.engine.fake_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
        ),
    ).create_engine_config()
    made.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    kind = StaticAsyncScheduler if ahead else StaticScheduler
    return kind(made, cache, StructuredOutputManager(made), BLOCK, BLOCK)


def request(name: str, prompt: int, answer: int = 4, ticket: dict[str, Any] | None = None) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    made = Request(name, list(range(prompt)), SamplingParams(max_tokens=answer, ignore_eos=True), None)
    made.kv_transfer_params = ticket
    return made


def step(engine: Any, arrived: set[str] = frozenset(), bad: set[int] = frozenset()) -> dict[str, int]:  # type: ignore[assignment]
    """One step, and the tokens that it scheduled; loads of *arrived* are done after it, *bad* blocks did not come."""
    output, made = run(engine, arrived, bad)
    engine.update_from_output(output, made)
    return dict(output.num_scheduled_tokens)


def run(engine: Any, arrived: set[str], bad: set[int] = frozenset()) -> tuple[Any, Any]:  # type: ignore[assignment]
    """What a step scheduled, and what a worker would make of it; the scheduler has not heard of that yet."""
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    output = engine.schedule()
    names = list(output.num_scheduled_tokens)
    sampled = [[] if engine.requests[name].is_prefill_chunk else [7] for name in names]
    came = KVConnectorOutput(finished_recving=set(arrived), invalid_block_ids=set(bad))
    engine.connector.asked -= arrived
    places = {name: index for index, name in enumerate(names)}
    return output, ModelRunnerOutput(names, places, sampled, kv_connector_output=came)


def add(engine: Any, *requests: Any) -> None:
    for each in requests:
        engine.add_request(each)


def test_prompts_run_alone_in_chunks_and_in_order_and_decodes_together() -> None:
    engine = scheduler()
    add(engine, request("a", 100), request("b", 10), request("c", 5))
    seen = [step(engine) for _ in range(5)]
    assert seen == [{"a": 64}, {"a": 36}, {"b": 10}, {"c": 5}, {"a": 1, "b": 1, "c": 1}]


def test_a_waiting_decode_is_never_further_away_than_the_limit() -> None:
    engine = scheduler(max_consecutive_prefill_steps=2)
    add(engine, request("a", 5, answer=50))
    assert step(engine) == {"a": 5}
    add(engine, request("long", 250), request("b", 10))
    seen = [step(engine) for _ in range(7)]
    assert [set(each) for each in seen] == [{"long"}, {"long"}, {"a"}, {"long"}, {"long"}, {"a", "long"}, {"b"}]


def test_a_request_whose_cache_came_joins_the_decodes_and_costs_no_step() -> None:
    engine = scheduler()
    add(engine, request("a", 5, answer=50))
    step(engine)
    add(engine, request("far", 100, ticket={"do_remote_prefill": True}))
    # Its load starts in a decode step, and it is there in the next one after its arrival.
    assert step(engine) == {"a": 1}
    assert engine.connector.asked == {"far"}
    assert step(engine, arrived={"far"}) == {"a": 1}
    assert step(engine) == {"a": 1, "far": 1}


def test_the_first_request_on_an_idle_engine_is_loaded_and_decoded() -> None:
    engine = scheduler()
    add(engine, request("far", 100, ticket={"do_remote_prefill": True}))
    assert step(engine, arrived={"far"}) == {}
    assert step(engine) == {"far": 1}


def test_a_cache_that_failed_to_come_is_computed_as_a_prefill() -> None:
    engine = scheduler()
    add(engine, request("a", 5, answer=50))
    step(engine)
    add(engine, request("far", 100, ticket={"do_remote_prefill": True}))
    step(engine)
    blocks = engine.kv_cache_manager.get_block_ids("far")[0]
    # The second block is missing: 32 tokens are good.
    assert step(engine, arrived={"far"}, bad={blocks[1]}) == {"a": 1}
    assert [step(engine) for _ in range(3)] == [{"far": 64}, {"far": 4}, {"a": 1, "far": 1}]


def test_a_ticket_that_offers_nothing_is_a_prefill_in_the_end() -> None:
    engine = scheduler()
    add(engine, request("a", 5, answer=50))
    step(engine)
    add(engine, request("far", 40, ticket={"do_remote_prefill": True, "tokens": 0}))
    assert [step(engine) for _ in range(3)] == [{"a": 1}, {"far": 40}, {"a": 1, "far": 1}]


def test_hidden_requests_are_back_at_their_places() -> None:
    engine = scheduler()
    add(engine, *(request(name, 10, answer=50) for name in "abcdef"))
    for _ in range(5):
        step(engine)
    assert [each.request_id for each in engine.running] == ["a", "b", "c", "d"]
    assert [each.request_id for each in engine.waiting] == ["e", "f"]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(12))
def test_under_any_load_no_step_is_mixed_and_all_come_to_an_end(seed: int, ahead: int) -> None:
    from vllm.v1.request import RequestStatus

    chance = random.Random(seed)
    engine = scheduler(blocks=chance.choice([14, 20, 200]), ahead=bool(ahead))
    todo = [
        request(
            f"r{number}",
            chance.randrange(1, 200),
            chance.randrange(1, 40),
            {"do_remote_prefill": True} if chance.random() < 0.4 else None,
        )
        for number in range(25)
    ]
    unheard: deque[tuple[Any, Any]] = deque()
    most, steps = 0, 0
    while todo or engine.has_unfinished_requests():
        steps += 1
        assert steps < 3000, f"stuck with {engine.running}, {list(engine.waiting)}"
        if todo and chance.random() < 0.3:
            engine.add_request(todo.pop(0))
        if engine.requests and chance.random() < 0.02:
            engine.finish_requests(chance.choice(list(engine.requests)), RequestStatus.FINISHED_ABORTED)
        done = {name for name in engine.connector.asked if name in engine.requests and chance.random() < 0.5}
        # A mixed step raises within; so does one above the largest bucket.
        unheard.append(run(engine, done))
        most = max(most, len(unheard) - 1)
        scheduled = unheard[-1][0].num_scheduled_tokens
        assert sum(scheduled.values()) <= TOKENS
        assert len(scheduled) <= 4
        while len(unheard) > (ahead if scheduled else 0):
            engine.update_from_output(*unheard.popleft())
    assert most == ahead
    assert engine.kv_cache_manager.block_pool.get_num_free_blocks() == engine.kv_cache_config.num_blocks - 1
