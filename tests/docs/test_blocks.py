"""Every block of the docs is run, planned, read or compiled; one that cannot be has a reason here, or is `text`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from baton.launch import flag_value
from baton.proxy import read_instances
from tests.docs.checks import COMMANDS, Wrong, check, fits, flags_of, make, parser_of, python, ran, refused, vllm_flags
from tests.docs.pages import BLOCKS, PAGES, ROOT, SPANS, Block, Command, Span, blocks_of, commands_in
from tests.docs.room import furnish, lay_out_files

SHOWN = ("text",)
"""Languages of what is shown and not to be run: an output, a picture in letters."""

EXAMPLES = sorted((ROOT / "examples").iterdir())

UNCHECKED: dict[str, str] = {}
"""The first line of a block that cannot be checked, and why."""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return furnish(tmp_path, monkeypatch)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_block_is_taken(room: Path, block: Block) -> None:
    take(room, block)


def take(room: Path, block: Block) -> None:
    """
    Raises:
        Wrong: something in it would be refused, or its kind is none that is known.
    """
    if block.text.partition("\n")[0] in UNCHECKED or block.language in SHOWN:
        return
    if block.language == "sh":
        lay_out_files(room, block.page, block.line)
        commands = [*made_before(block), *commands_in(block.text)]
        if not commands:
            raise Wrong("there is no command in it")
        for command in commands:
            check(command)
    elif block.language == "yaml":
        take_yaml(room, block.text)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "python":
        compile(block.text, str(block), "exec")
    else:
        raise Wrong(f"{block}: blocks of {block.language or 'no language'!r} are not checked: say sh, yaml, json, ...")


def made_before(block: Block) -> list[Command]:
    """The commands above a block, on its page, that write files."""
    return [
        command
        for above in BLOCKS
        if above.page == block.page and above.line < block.line and above.language == "sh"
        for command in commands_in(above.text)
        if command.words[:2] == ("baton", "init") or "--output" in command.words
    ]


def take_yaml(room: Path, text: str) -> None:
    """A cluster that would be let start, or a file of instances."""
    path = room / "it.yaml"
    path.write_text(text)
    if isinstance(yaml.safe_load(text), list):
        read_instances(path)
    else:
        fits(["plan", "-f", str(path)])


def test_nothing_stays_unchecked_without_need() -> None:
    firsts = {block.text.partition("\n")[0] for block in BLOCKS}
    assert set(UNCHECKED) <= firsts
    assert all(UNCHECKED.values())


def test_every_page_is_read() -> None:
    fences = sum(len(re.findall(r"^```", page.read_text(), re.M)) for page in PAGES)
    assert len(BLOCKS) == fences / 2, "a block that is indented and not fenced, or within a list"
    assert len([block for block in BLOCKS if block.language == "sh"]) > 25


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.name))
def test_an_example_would_be_let_start(room: Path, path: Path) -> None:
    fits(["plan", "-f", f"examples/{path.name}"])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.name))
def test_the_command_at_the_head_of_an_example_is_taken(room: Path, path: Path) -> None:
    said = re.findall(
        r"(baton .+)$", "\n".join(line for line in path.read_text().splitlines() if line[0:1] == "#"), re.M
    )
    assert said, "the head of an example says how it is used"
    for words in said:
        (command,) = commands_in(words)
        assert str(path.relative_to(ROOT)) in command.words
        check(command)


def test_there_is_an_example_of_every_topology_on_one_host_and_on_several(room: Path) -> None:
    seen = {each for path in EXAMPLES for each in topologies_of(path.name)}
    both = {"1P1D", "xPyD", "hybrid TP", "DP and EP on decode", "Eagle3"}
    assert {(name, several) for name in both for several in (False, True)} - seen == set()
    assert {("write mode", False), ("bidirectional KV", False), ("component DP", False)} - seen == set()


def topologies_of(example: str) -> set[tuple[str, bool]]:
    """What an example shows, and whether its engines are on several hosts."""
    plan = json.loads(ran(["plan", "-f", f"examples/{example}", "--json"])[1])
    engines = [each for host in plan["hosts"] for each in host["processes"] if each["role"] != "proxy"]
    several = sum(any(each["role"] != "proxy" for each in host["processes"]) for host in plan["hosts"]) > 1

    def values(role: str, flag: str, default: str = "1") -> list[str]:
        return [flag_value(each["argv"], flag) or default for each in engines if each["role"] == role]

    prefill, decode = (values(role, "--tensor-parallel-size") for role in ("prefill", "decode"))
    drafts = [json.loads(each) for role in ("prefill", "decode") for each in values(role, "--speculative-config", "{}")]
    words = [word for each in engines if each["role"] == "decode" for word in each["argv"]]
    shown = {
        "1P1D": len(prefill) == len(decode) == 1,
        "xPyD": len(prefill) > 1 and len(decode) > 1,
        "hybrid TP": set(prefill) != set(decode),
        "DP and EP on decode": "--enable-expert-parallel" in words
        and any(int(size) > 1 for size in values("decode", "--data-parallel-size")),
        "Eagle3": all(draft.get("method") == "eagle3" for draft in drafts),
        "write mode": plan["transfer_mode"] == "write",
        "bidirectional KV": any('"bidirectional_kv_xfer": true' in word for word in words),
        "component DP": any("attention_dp_size" in word for word in words),
    }
    return {(name, several) for name, is_so in shown.items() if is_so}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_a_commands_help_are_taken(room: Path, name: str) -> None:
    lay_out_files(room, "docs/multi-node.md", 0)
    for line in (parser_of(name).epilog or "").splitlines():
        found = re.search(r"(baton .+|python -m .+)$", line)
        if found and "$(" not in line and "--help" not in line:
            for command in commands_in(found[1]):
                check(command)


# --- what stands within lines


def called(span: Span) -> Iterator[list[str]]:
    """The commands of ours that a span shows; `...` may stand for words."""
    if re.match(r"(baton|make|python) \S", span.text) and "$(" not in span.text:
        for command in commands_in(span.text.replace(" | ", " ")):
            yield list(command.words)


CALLS = [span for span in SPANS if list(called(span))]


@pytest.mark.parametrize("span", CALLS, ids=str)
def test_a_command_within_a_line_exists_with_its_flags(room: Path, span: Span) -> None:
    for program, *words in called(span):
        if program == "baton":
            assert words[0].isupper() or words[0] in COMMANDS, span
            if words[0] in COMMANDS:
                known = flags_of(parser_of(words[0])) | {"--help", "--version"}
                passes = vllm_flags() if words[0] in ("engine", "up", "plan", "doctor") else set()
                each = (each for word in words for each in word.split())
                used = {one.partition("=")[0] for one in each if one.startswith("-") and one != "--"}
                assert used <= known | passes, span
        elif program == "make":
            make(words)
        else:
            python(tuple("1" if word == "N" else word for word in words if word != "..."))


FLAGS = [span for span in SPANS if re.fullmatch(r"--[a-z][\w-]+( .*)?", span.text)]
ELSEWHERE = {
    "--max-num-seq": "an abbreviation, which is refused",
    "--no-deps": "pip's",
    "--shm-size": "docker's",
}
"""Flags that the docs name and that are neither Baton's nor vLLM's."""


def test_a_flag_within_a_line_exists_somewhere() -> None:
    ours = {flag for name in COMMANDS for flag in flags_of(parser_of(name))}
    scripts = {
        flag
        for path in (*(ROOT / "bench").rglob("*.py"), *(ROOT / "scripts").glob("*.py"), ROOT / "src/baton/sim/chaos.py")
        for flag in re.findall(r'"(--[a-z-]+)"', path.read_text())
    }
    known = ours | vllm_flags() | scripts | set(ELSEWHERE)
    unknown = [str(span) for span in FLAGS if span.text.split()[0].partition("=")[0] not in known]
    assert unknown == [] or not vllm_flags()


PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|yaml|md|txt|json)|test_\w+\.py")


def test_a_file_that_is_named_within_a_line_exists() -> None:
    roots = (ROOT, ROOT / "src/baton", ROOT / "tests", ROOT / "tests/e2e", ROOT / "docs", ROOT / "src")
    unknown = [
        str(span)
        for span in SPANS
        for name in PATH.findall(span.text.partition("::")[0])
        if span.text.partition("::")[0] == name
        and not any((root / name).exists() for root in roots)
        and not name.startswith(FOREIGN)
    ]
    assert unknown == []


FOREIGN = ("v1/", "vllm/", "entrypoints/", "scripts/one", "scripts/two")
"""How files of vLLM begin, and those that a command of the docs makes."""


def anchors(page: Path) -> set[str]:
    """Those of a page's headings, as forges make them."""
    found = re.findall(r"^#+ +(.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in found}


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append(f"{page.name}: {target}")
    assert broken == []


# --- the checks themselves


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("baton up --prefil 2", "did you mean --prefill"),
        ("baton up -- --max-num-seq 8", "--max-num-seq is neither"),
        ("baton up MODEL --prefill-args '--tensor-parallel-size 3'", "attention heads"),
        ("baton up -f examples/neuron-2p3d-hosts.yaml", "plans 5 hosts"),
        ("baton engine smollm2-135m-instruct --role decoder", "invalid choice"),
        ("baton engine nothing --role decode", "neither an embedded model"),
        ("baton plan -f nowhere.yaml", "nowhere.yaml"),
        ("baton proxy --prefiller-hosts a b --prefiller-ports 1 2 3", "don't pair"),
        ("baton sim --fault 'explode'", "explode"),
        ("baton status --follow", "unknown argument '--follow'"),
        ("baton serve", "baton has no command"),
        ("curl localhost:8000/v1/completion -d '{}'", "nothing answers POST /v1/completion"),
        ("curl -X PUT localhost:8000/instances", "nothing answers PUT"),
        ("curl localhost:8000/v1/completions -d '{\"model\": }'", "Expecting value"),
        ("make everything", "make has no target"),
        ("python bench/startup.py --loops 3", "knows no --loops"),
        ("python bench/nothing.py", "there is no bench/nothing.py"),
        ("pip install '.[everything]'", "no extra everything"),
        ("BATTON_CACHE=x baton up", "nobody reads the variable BATTON_CACHE"),
        ("ip netns exec host1 baton up --prefil 2", "did you mean --prefill"),
        ("ip neigh", "only links"),
        ("kubectl apply", "no program that this test knows"),
    ],
)
def test_what_is_wrong_is_seen(room: Path, text: str, why: str) -> None:
    if "max-num-seq " in text and not vllm_flags():
        pytest.skip("no vLLM is installed whose flags could be read")
    (command,) = commands_in(text)
    refused(command, why)


def test_a_block_of_an_unknown_kind_is_no_block(room: Path, tmp_path: Path) -> None:
    for language in ("", "toml", "bash"):
        with pytest.raises(Wrong, match="are not checked"):
            take(room, Block("docs/x.md", 1, language, "x = 1\n"))
    with pytest.raises(Wrong, match="no command"):
        take(room, Block("docs/x.md", 1, "sh", "# nothing\n"))


def test_commands_are_read_as_a_shell_reads_them() -> None:
    text = "A=1 one 'two  three' \\\n  --four # five\nsix | seven > eight && nine '{\n}'\n"
    assert commands_in(text) == [
        Command(("one", "two  three", "--four"), {"A": "1"}),
        Command(("six",)),
        Command(("seven",), {}, piped=True),
        Command(("nine", "{\n}")),
    ]
    loop = "for n in 1 2; do\n  one $n &\ndone\nfor n in 3; do two; done\n"
    assert [command.words for command in commands_in(loop)] == [("one", "$n"), ("two",)]
    with pytest.raises(ValueError, match="more than a plain command"):
        commands_in("(one)")
    with pytest.raises(ValueError, match="has no end"):
        commands_in("one 'two")


def test_every_fence_of_a_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.docs.pages.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```sh\nmake up\n```\n\n- b\n\n  ```yaml\n  a: 1\n  ```\n\n    indented\n")
    assert [(block.line, block.language, block.text) for block in blocks_of(page)][:2] == [
        (3, "sh", "make up\n"),
        (9, "yaml", "a: 1\n"),
    ]
