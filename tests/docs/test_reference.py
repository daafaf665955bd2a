"""The reference names all flags, keys, metrics, headers, variables and errors that there are, and no others."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.cluster import Role
from baton.launch import schema
from baton.proxy import legs
from baton.proxy.admin import _POSTED as PASSED_POSTS
from baton.proxy.admin import _READ as PASSED_READS
from baton.proxy.admin import ADMIN, OPEN
from baton.proxy.admission import Gate
from baton.proxy.attempts import Cause as RetryCause
from baton.proxy.errors import _ANTHROPIC_TYPES, _TYPES
from baton.proxy.fleet import Ejection, Fleet, InstanceState
from baton.proxy.journey import State
from baton.proxy.metrics import PARTS, Metrics
from baton.proxy.routing import POLICIES
from baton.proxy.transfer_policy import Cause, OnNoTransfer
from baton.proxy.transfers import Transfers
from baton.proxy.turns import TurnStore, Why
from tests.docs.checks import COMMANDS, flags_of, parser_of
from tests.docs.pages import ROOT, spans_of

PAGES = sorted((ROOT / "docs").glob("reference*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES)
SPANS = [span.text for page in PAGES for span in spans_of(page)]
SOURCE = ROOT / "src" / "baton"


def section(title: str) -> str:
    """The text under the heading that begins with *title*, up to the next one of its depth or above."""
    found = re.search(rf"^(#+) {re.escape(title)}\b.*$", TEXT, re.M)
    assert found, f"the reference has no heading {title!r}"
    rest = TEXT[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.M)
    return rest[: end.start()] if end else rest


def cells(text: str, column: int = 0) -> Iterator[str]:
    """The cells of a column of all tables in *text*, without their heads."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    for row, after in zip(rows, [*rows[1:], []], strict=False):
        if after and set("".join(after)) <= set("- "):
            continue
        if set("".join(row)) <= set("- "):
            continue
        if column < len(row):
            yield row[column]


def named(pattern: str, text: str) -> set[str]:
    """What matches in the code spans of *text*."""
    return {found for span in re.findall(r"`([^`]+)`", text) for found in re.findall(pattern, span)}


# --- flags

FLAG = r"(?<![\w-])--?[a-z][\w-]*"
TOGETHER = ("status", "logs", "scale", "drain", "restart", "down")
SECTIONS = {name: f"baton {', '.join(TOGETHER) if name in TOGETHER else name}" for name in COMMANDS}
WITH_A_CLUSTER = ("plan", "doctor")
"""Their sections say that they take all flags of a cluster, which stand in the one of `baton up`."""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_a_command_is_in_its_section(name: str) -> None:
    text = section(SECTIONS[name])
    said = named(FLAG, text)
    if name in WITH_A_CLUSTER:
        assert "all that describe a cluster" in text
        said |= named(FLAG, section("baton up"))
    flags = flags_of(parser_of(name))
    # Of a switch its first form will do.
    flags -= {flag for flag in flags if flag.startswith("--no-") and f"--{flag[5:]}" in flags}
    assert flags - said == set()


@pytest.mark.parametrize("title", sorted(set(SECTIONS.values())))
def test_every_flag_in_a_sections_tables_is_one_of_the_command(title: str) -> None:
    flags = {flag for name, each in SECTIONS.items() if each == title for flag in flags_of(parser_of(name))}
    if title == "baton up":
        # Within it stands what engines must agree in, by vLLM's flags.
        text = re.sub(r"#### Do the engines fit together\?.*", "", section(title), flags=re.S)
    else:
        text = section(title)
    said = {flag for cell in cells(text) for flag in named(FLAG, cell)}
    assert said - flags == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flags_number_by_default_is_in_its_row(name: str) -> None:
    rows = [row for row in section(SECTIONS[name]).splitlines() if row.startswith("| `")]
    for action in parser_of(name)._actions:
        row = next((row for row in rows if set(action.option_strings) & named(FLAG, row.split("|")[1])), None)
        default = action.default
        if row is None or isinstance(default, bool) or not isinstance(default, int | float) or default == float("inf"):
            continue
        number = f"{default:.10g}"
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", row), (
            f"{action.option_strings[0]} is {number}: {row}"
        )


# --- the cluster file


def keys_of(value: Any, definitions: dict[str, Any]) -> set[str]:
    """Every name of a key in a JSON schema, but for names that are the user's own."""
    found: set[str] = set()
    if isinstance(value, dict):
        for name, each in value.get("properties", {}).items():
            found |= {name} | keys_of(each, definitions)
        for name, each in value.items():
            if name == "$ref":
                found |= keys_of(definitions.pop(each.rpartition("/")[2], {}), definitions)
            elif name not in ("properties", "$defs"):
                found |= keys_of(each, definitions)
    elif isinstance(value, list):
        for each in value:
            found |= keys_of(each, definitions)
    return found


def test_every_key_of_a_cluster_file_is_named_and_no_other() -> None:
    whole, text = schema(), section("Cluster files")
    keys = keys_of(whole, dict(whole["$defs"]))
    firsts = {part for cell in cells(text) for key in named(r"[\w.]+", cell) for part in key.split(".")}
    also = {part for cell in cells(text, 2) for key in named(r"[\w.]+", cell) for part in key.split(".")}
    assert keys - firsts - also == set()
    assert firsts - keys == set()


CONFIG_KEYS = (
    *("attention_dp_size", "embedding_dp_size", "mlp_dp_size", "lm_head_dp_size"),
    *("num_batched_tokens_buckets", "num_seqs_buckets", "max_consecutive_prefill_steps", "on_device_sampling_config"),
    *("static_shapes", "all_greedy", "max_top_k"),
)


def test_every_key_of_the_engines_own_config_is_named() -> None:
    read = set()
    for path in (SOURCE / "engine/static/buckets.py", SOURCE / "engine/components/config.py"):
        read |= {each for each in constants(path) if each in CONFIG_KEYS}
    assert read | {key for key in CONFIG_KEYS if key.endswith("_dp_size")} == set(CONFIG_KEYS)
    assert [key for key in CONFIG_KEYS if f"`{key}`" not in TEXT] == []


def test_every_key_of_kv_connector_extra_config_that_is_read_is_named() -> None:
    read = {
        key
        for path in (SOURCE / "engine").rglob("*.py")
        for key in re.findall(r"""(?:get_from_extra_config|extra|get)\(\s*"(\w+)"\s*,""", path.read_text())
        if key.startswith(("push_", "kv_lease", "kv_recompute", "decoder_kv", "bidirectional_kv"))
    }
    assert read >= {"kv_lease_duration", "push_registration_timeout"}
    assert sorted(key for key in read if f"`{key}`" not in TEXT) == []


# --- metrics

METRIC = r"\bbaton_[a-z_]+"


def metrics_of_the_proxy() -> set[str]:
    """By the names that a scraper sees, without what a histogram adds."""
    metrics = Metrics(Fleet([]), Gate(), turns=TurnStore(), transfers=Transfers())
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in metrics.collect()}


def metrics_of_the_engine() -> set[str]:
    """Read from the source: it imports vLLM."""
    found = {each for each in constants(SOURCE / "engine/counters.py") if re.fullmatch(METRIC, each)}
    return {name if name.endswith("_seconds") else f"{name}_total" for name in found}


def test_every_metric_is_named_and_no_other() -> None:
    said = named(METRIC, section("Metrics of the proxy"))
    assert said - {"baton_prefill_seconds_count"} == metrics_of_the_proxy()
    said = named(METRIC, section("baton engine")) - {"baton_config"}
    assert said == metrics_of_the_engine()


def test_no_page_names_a_metric_that_is_none() -> None:
    known = metrics_of_the_proxy() | metrics_of_the_engine() | {"baton_config"}
    known |= {f"{name}_{part}" for name in known for part in ("count", "sum", "bucket")}
    unknown = [
        f"{page.name}: {name}"
        for page in (ROOT / "docs").glob("*.md")
        for span in spans_of(page)
        for name in re.findall(METRIC, span.text)
        if name not in known
    ]
    assert unknown == []


# --- headers


@functools.cache
def constants(path: Path) -> frozenset[str]:
    """Every text and every bytes in a file's source, but for docstrings."""
    found = set()
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in prose:
            if isinstance(node.value, bytes):
                found.add(node.value.decode("latin-1"))
            elif isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


HEADER = re.compile(r"x-(?!gzip)[a-z-]*[a-z]|authorization|retry-after|www-authenticate|allow|traceparent|tracestate")


def test_every_header_is_named_and_no_other() -> None:
    read = {each for path in (SOURCE / "proxy").rglob("*.py") for each in constants(path) if HEADER.fullmatch(each)}
    said = {name.lower() for cell in cells(section("Headers of the proxy")) for name in named(r"[\w-]+", cell)}
    assert read - said == set()
    everything = {each for path in (SOURCE / "proxy").rglob("*.py") for each in constants(path)}
    everything |= {f"x-baton-{role}" for role in Role if "x-baton-" in everything}
    assert said - everything - {"x-ratelimit-*"} - {"content-type"} == set()


# --- variables

VARIABLE = re.compile(r"(?:BATON|VLLM|NEURON|CUDA|OMP|UCX|HF|FI|XDG|NIXL)_[A-Z][A-Z_]+")
NOT_A_VARIABLE = {  # names in the code, and
    "BATON_CONNECTOR",
    "NIXL_NAP_US",
    "VLLM_RPC_BASE_PATH",  # set for vLLM by the supervisor, for sockets in its scratch folder
}


def variables() -> set[str]:
    return {
        each for path in SOURCE.rglob("*.py") for each in constants(path) if VARIABLE.fullmatch(each)
    } - NOT_A_VARIABLE


def test_every_variable_is_named_and_no_other() -> None:
    said = {each for cell in cells(section("Environment")) for each in named(VARIABLE.pattern, cell)}
    assert said == variables()


def test_no_page_names_a_variable_of_batons_that_is_none() -> None:
    known = variables()
    unknown = [
        f"{page.name}: {name}"
        for page in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"\bBATON_[A-Z_]+", page.read_text())
        if name not in known
    ]
    assert unknown == []


# --- errors and endpoints


def statuses() -> set[int]:
    """Those that the proxy answers with in its own name."""
    found = set()
    for path in (*(SOURCE / "proxy").rglob("*.py"), *(SOURCE / "http").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                value = node.args[0].value
                if called in ("ProxyError", "Refused", "_twice", "refusal") and isinstance(value, int):
                    found.add(value)
    return found


def test_every_status_of_an_error_is_named_and_no_other() -> None:
    said = {int(each) for cell in cells(section("Errors of the proxy")) for each in re.findall(r"\b[45]\d\d\b", cell)}
    assert said == statuses()


def test_every_type_of_an_error_is_named() -> None:
    types = {*_TYPES.values(), *_ANTHROPIC_TYPES.values(), "invalid_request_error", "internal_error", "api_error"}
    assert {each for each in types if f"`{each}`" not in section("Errors of the proxy")} == set()


def test_every_endpoint_is_named_and_no_other() -> None:
    here = {*legs.RULES, *OPEN, *PASSED_READS, *PASSED_POSTS, ADMIN, f"{ADMIN}/ID", f"{ADMIN}/ID/drain"}
    said = {
        path.partition("?")[0]
        for cell in cells(section("Endpoints of the proxy"))
        for path in named(r"(?<![\w.])/[\w/]+(?:\?\S+)?", cell)
    }
    assert said == here


STATES = set(State) - {State.DONE, State.FAILED, State.CANCELLED}
"""In which a request may end otherwise than well."""
WORDS = [*Cause, *RetryCause, *Why, *Ejection, *InstanceState, *STATES, *OnNoTransfer, *PARTS, *POLICIES]


@pytest.mark.parametrize("word", sorted(set(map(str, WORDS))))
def test_every_word_that_an_answer_or_a_label_may_hold_is_named(word: str) -> None:
    assert re.search(rf"\b{re.escape(word.replace('_', ' '))}\b|\b{re.escape(word)}\b", TEXT)
