"""From what a user calls a model to what `vllm serve` takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from baton.models.embedded import EMBEDDED, ModelError, Report, ensure

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?\Z")


@dataclass(frozen=True)
class ResolvedModel:
    """A model ready to be served.

    Attributes:
        target: the folder or hub id that goes on the engine's command line.
        served_name: the name that clients use.
        engine_flags: flags that suit it, by name; the user's own win.
        local: whether it lies on this disk (then the engine never asks a hub).
    """

    target: str
    served_name: str
    engine_flags: tuple[tuple[str, str], ...] = ()
    local: bool = True


def resolve(model: str, report: Report = lambda _: None, root: Path | None = None) -> ResolvedModel:
    """What *model* means: an embedded model's name, a folder, or a hub id.

    Raises:
        ModelError: it is none of them; the message names it and what would do.
    """
    embedded = EMBEDDED.get(model.lower())
    if embedded is not None:
        return ResolvedModel(str(ensure(embedded, root, report)), embedded.name, embedded.engine_flags)
    try:
        folder = Path(model or "\0").expanduser()
        is_folder, is_there = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else "there is no such home"
        raise ModelError(f"there is no model at {_shown(model)}: {why}: give another path") from error
    if is_folder:
        if not (folder / "config.json").is_file():
            raise ModelError(f"{model!r} is a folder without a config.json: it holds no model that vLLM can serve")
        return ResolvedModel(str(folder.resolve()), model.rstrip("/"))
    if is_there:
        raise ModelError(f"{model!r} is a file; give the folder that holds config.json and the weights")
    looks_like_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if looks_like_path or not _HUB_ID.match(model):
        raise ModelError(
            f"there is no model at {model!r}. Give a folder with config.json and weights, a hub id such as "
            f"org/name, or an embedded model: {', '.join(sorted(EMBEDDED))}"
        )
    if "/" not in model:
        raise ModelError(
            f"{model!r} is neither an embedded model ({', '.join(sorted(EMBEDDED))}), a folder here, "
            "nor a hub id (org/name)"
        )
    return ResolvedModel(model, model, local=False)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
