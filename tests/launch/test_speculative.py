from __future__ import annotations

import json
from typing import Any

import pytest

from baton.launch import EngineInstall, PlanRequest, check_cluster, cluster_commands, plan
from baton.launch.speculative import check_speculative, mismatches, settings
from baton.models import ResolvedModel

EAGLE = {"method": "eagle3", "model": "/drafts/a", "num_speculative_tokens": 3}


def flags(**more: Any) -> tuple[str, ...]:
    return ("--max-num-seqs", "8", "--speculative-config", json.dumps(EAGLE | more))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ((), ()),
        (flags(), flags()),
        # Prefill drafts for its KV cache's sake alone.
        (flags(num_speculative_tokens=1), flags(num_speculative_tokens=5)),
        (flags(kv_cache_dtype="auto"), flags()),
        (flags(kv_cache_dtype="fp8"), (*flags(), "--kv-cache-dtype", "fp8")),
        (flags(parallel_drafting=False), flags()),
        (flags(), (*flags()[:2], "-sc", json.dumps(EAGLE))),
        (flags(), ("--spec-method", "eagle3", "--spec-model=/drafts/a", "--spec-tokens", "3")),
        (flags(), ("--speculative-config.method", "eagle3", "--speculative-config.model=/drafts/a")),
        # What these draft from is no KV cache of their own.
        ((), ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')),
        ((), ("--speculative-config", '{"model": "[ngram]", "num_speculative_tokens": 3}')),
        (("--spec-method", "suffix"), ("--spec-method", "ngram")),
        (("--spec-method", "deepseek_mtp"), ("--spec-method", "mtp", "--spec-model", "the-model-itself")),
        # vLLM finds the method out from the draft.
        (flags(method=None), flags()),
        ((), ("--spec-model", "who/knows")),
    ],
)
def test_settings_that_fit_together(prefill: tuple[str, ...], decode: tuple[str, ...]) -> None:
    assert mismatches(prefill, decode) == []
    assert mismatches(decode, prefill) == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"method": "eagle"}, "says method 'eagle3' for prefill and 'eagle' for decode"),
        ({"model": "/drafts/b"}, "says model '/drafts/a' for prefill and '/drafts/b' for decode"),
        ({"revision": "v2"}, "says revision None for prefill and 'v2' for decode"),
        ({"code_revision": "v2"}, "says code_revision None for prefill and 'v2' for decode"),
        ({"kv_cache_dtype": "fp8"}, "says kv_cache_dtype 'auto' for prefill and 'fp8' for decode"),
        ({"parallel_drafting": True}, "says parallel_drafting False for prefill and True for decode"),
    ],
)
def test_a_difference_names_both_values(more: dict[str, Any], words: str) -> None:
    (line,) = mismatches(flags(), flags(**more))
    assert words in line
    assert "give both roles the same" in line


def test_every_difference_is_named() -> None:
    assert len(mismatches(flags(), flags(method="draft_model", model="/drafts/b", revision="v2"))) == 3


def test_a_draft_on_one_role_alone_names_the_other() -> None:
    assert "decode drafts with 'eagle3' and prefill has no --speculative-config" in mismatches((), flags())[0]
    assert "prefill drafts with 'eagle3' and decode has no --speculative-config" in mismatches(flags(), ())[0]


def test_two_draft_models_are_told_apart_though_vllm_would_not() -> None:
    """Its hash has none of a whole model as a draft: the wrong KV cache would arrive, unseen."""
    ours, theirs = (("--spec-method", "draft_model", "--spec-model", name) for name in ("a", "b"))
    assert "says model 'a' for prefill and 'b' for decode" in mismatches(ours, theirs)[0]


def test_the_last_of_several_counts() -> None:
    assert settings((*flags(), *flags(model="/drafts/b")))["model"] == "/drafts/b"


def test_what_is_no_json_object_is_named() -> None:
    assert mismatches(("--speculative-config", "eagle3"), flags())[0].startswith("--speculative-config 'eagle3' is not")


def test_a_cluster_is_refused_with_a_line_for_a_difference_not_for_a_pair() -> None:
    cluster = plan(PlanRequest(model="m", prefill=2, decode=3, prefill_args=flags(), decode_args=flags(method="eagle")))
    (line,) = check_speculative(cluster)
    install = EngineInstall("vllm", "0.32.0", "accelerator", has_nixl=True)
    commands = cluster_commands(cluster, ResolvedModel("m", "m", ()), install, {})
    engines = [commands[instance.id] for instance in cluster.instances]
    problems = check_cluster(cluster, engines, install, local_model=False)
    assert [problem.words for problem in problems if problem.what == line] == [True]
