"""Replicas of a decode server that share the weights of components, behind a plain prefill server."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.e2e import tiny
from tests.e2e.engines import Server, eventually, post
from tests.e2e.topology import (
    MODEL,
    TOKENS_OUT,
    Cluster,
    Engine,
    answers,
    check,
    cluster,
    prompts,
    reference,
    start_engine,
    used_kv,
)

COMPONENTS = ("attention", "embedding", "mlp", "lm_head")
FEW = dict(list(prompts().items())[::3])
"""Prompts of many lengths, for the shapes of which there are several."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(logs: Path, model: Path) -> Iterator[Server]:
    """The prefill server of all decode servers here; alone it is the one server whose text they must give."""
    server = start_engine("components-prefill", model, "prefill", Engine(), logs)
    try:
        server.wait_healthy()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def one_servers(plain: Server) -> dict[str, str]:
    return reference(plain, prompts())


def sharing(components: Sequence[str], *, tensor: int = 1, flags: Sequence[str] = ()) -> Engine:
    """A decode server of two replicas of *tensor* ranks that share *components*."""
    own = json.dumps({"baton_config": {f"{component}_dp_size": 2 for component in components}})
    size = ("--data-parallel-size", "2", "--tensor-parallel-size", str(tensor))
    return Engine((*size, "--additional-config", own, *flags), side_channels=2)


@contextlib.contextmanager
def decoding(name: str, engine: Engine, plain: Server, model: Path, logs: Path) -> Iterator[Cluster]:
    with cluster(f"components-{name}", model, logs, prefill=(plain,), decode=(engine,)) as made:
        yield made


def weight_bytes(server: Server) -> list[dict[str, int]]:
    """What each rank said of its weights, by component."""
    found = re.findall(r"Bytes of weights on rank (\d+): (.*)", server.log.read_text(errors="replace"))
    return [
        {name: int(size) for name, size in (part.split(" ") for part in said.strip().split(", "))}
        for _, said in sorted(found, key=lambda each: int(each[0]))
    ]


WHOLE = {"attention": 4 * 4 * (256 * (256 + 2 * 128) + 256 * 256), "mlp": 4 * 4 * 3 * 256 * 512} | dict.fromkeys(
    ("embedding", "lm_head"), 4 * 320 * 256
)
"""Bytes: float32 x layers x (queries, keys and values, output), float32 x layers x three matrices, float32 x rows."""


def computed(components: Sequence[str], tensor: int) -> dict[str, int]:
    """Bytes of a rank's weights by component: over the tensor parallel ranks, and over two replicas where shared."""
    return {name: size // tensor // (2 if name in components else 1) for name, size in WHOLE.items()}


def finished(server: Server) -> list[float]:
    """How many requests each of two replicas has finished."""
    return [server.metric("vllm:request_success_total", engine=str(rank)) for rank in (0, 1)]


def ask_rank(server: Server, rank: int, prompt: Sequence[int], **more: object) -> Mapping[str, object]:
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": TOKENS_OUT, "temperature": 0, "ignore_eos": True}
    code, _, raw = post(f"{server.url}/v1/completions", body | more, {"X-data-parallel-rank": str(rank)})
    assert code == 200, raw
    choice: Mapping[str, object] = json.loads(raw)["choices"][0]
    return choice


@pytest.mark.long
@pytest.mark.parametrize("component", COMPONENTS)
def test_each_component_alone_gives_one_servers_text(
    component: str, plain: Server, one_servers: dict[str, str], model: Path, logs: Path
) -> None:
    with decoding(component, sharing([component]), plain, model, logs) as made:
        assert weight_bytes(made.decode[0]) == [computed([component], 1)] * 2
        check(made, {name: one_servers[name] for name in FEW}, FEW)


@pytest.fixture(scope="module")
def all_shared(logs: Path, model: Path, plain: Server) -> Iterator[Cluster]:
    with decoding("all", sharing(COMPONENTS), plain, model, logs) as made:
        yield made


def test_all_components_together_give_one_servers_text(all_shared: Cluster, one_servers: dict[str, str]) -> None:
    """One after the other: a replica works and the other one steps along idle. 8 at once: batches of all sizes."""
    check(all_shared, one_servers, prompts())
    (decode,) = all_shared.decode
    assert weight_bytes(decode) == [computed(COMPONENTS, 1)] * 2
    assert min(eventually(lambda: [count > 0 for count in finished(decode)], [True, True])), "a replica had no request"
    moved, both = "vllm:nixl_bytes_transferred_sum", [True, True]
    assert eventually(lambda: [decode.metric(moved, engine=rank) > 0 for rank in "01"], both) == both
    assert all_shared.proxy.metric("baton_prefill_without_ticket_total") == 0


def test_steps_of_a_few_sizes_and_shared_components_together_give_one_servers_text(
    plain: Server, one_servers: dict[str, str], model: Path, logs: Path
) -> None:
    """Each replica pads its own steps, and an idle one its dummy step; padded rows are exchanged like true ones."""
    sizes = {f"{component}_dp_size": 2 for component in COMPONENTS}
    own = json.dumps({"baton_config": {**sizes, "num_batched_tokens_buckets": [32, 128], "num_seqs_buckets": [2, 8]}})
    flags = ("--data-parallel-size", "2", "--max-num-batched-tokens", "128", "--additional-config", own)
    with decoding("static", Engine(flags, side_channels=2), plain, model, logs) as made:
        (decode,) = made.decode
        check(made, {name: one_servers[name] for name in FEW}, FEW)
        # Prompts that it computes itself, beside decodes of the other replica.
        assert answers(decode.url, FEW, 8) == {name: one_servers[name] for name in FEW}
        assert weight_bytes(decode) == [computed(COMPONENTS, 1)] * 2
        for rank in "01":
            true, padded = (
                decode.metric(f"baton_step_decode_{name}_total", engine=rank) for name in ("tokens", "padded_tokens")
            )
            assert 0 < true < padded


@pytest.mark.parametrize("rank", [0, 1])
def test_one_replica_may_do_all_the_work(all_shared: Cluster, one_servers: dict[str, str], rank: int) -> None:
    for name, prompt in FEW.items():
        assert ask_rank(all_shared.proxy, rank, prompt)["text"] == one_servers[name]


def test_prompts_computed_on_the_decode_server_give_one_servers_text(
    all_shared: Cluster, one_servers: dict[str, str]
) -> None:
    """Without a ticket: prefill of one replica beside decode, prefill and nothing at all of the other."""
    (decode,) = all_shared.decode
    for at_once in (1, 8):
        assert answers(decode.url, prompts(), at_once) == one_servers
    assert eventually(lambda: used_kv([decode]), 0.0) == 0.0


def test_logprobs_of_a_prompt_keep_the_replicas_in_step(
    all_shared: Cluster, one_servers: dict[str, str], plain: Server
) -> None:
    """Their logits are computed beside those of the step: more often on one replica than on the other."""
    (decode,) = all_shared.decode
    name, prompt = "77 tokens", prompts()["77 tokens"]
    made, expected = (ask_rank(server, rank, prompt, prompt_logprobs=1) for server, rank in ((decode, 1), (plain, 0)))
    assert made["text"] == expected["text"] == one_servers[name]
    assert best(made) == pytest.approx(best(expected), abs=1e-3)


def best(choice: Mapping[str, object]) -> list[float]:
    """The logprobs of a prompt's own tokens."""
    scores = choice["prompt_logprobs"]
    assert isinstance(scores, list)
    return [next(iter(score.values()))["logprob"] for score in scores if score]


@pytest.mark.parametrize(
    "components",
    [*(pytest.param((name,), marks=pytest.mark.long) for name in COMPONENTS), COMPONENTS],
    ids="+".join,
)
def test_replicas_of_several_ranks_give_one_servers_text(
    components: tuple[str, ...], plain: Server, one_servers: dict[str, str], model: Path, logs: Path
) -> None:
    """Four ranks on two cores are slow: few prompts."""
    asked = dict(list(FEW.items())[::2])
    with decoding(f"tp2-{len(components)}-{components[0]}", sharing(components, tensor=2), plain, model, logs) as made:
        assert weight_bytes(made.decode[0]) == [computed(components, 2)] * 4
        check(made, {name: one_servers[name] for name in asked}, asked)
        name, prompt = next(iter(asked.items()))
        assert ask_rank(made.proxy, 1, prompt)["text"] == one_servers[name]


@pytest.mark.parametrize(
    ("make", "components", "flags"),
    [
        (tiny.qwen3, COMPONENTS, ()),
        (tiny.qwen3_moe, ("attention", "embedding", "lm_head"), ("--enable-expert-parallel",)),
    ],
    ids=["qwen3-tied", "qwen3-moe"],
)
def test_other_models_give_one_servers_text(make, components, flags, logs: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = make(tmp_path)
    with cluster(f"components-{make.__name__}", folder, logs, decode=(sharing(components, flags=flags),)) as made:
        check(made, reference(made.prefill[0], FEW), FEW)
