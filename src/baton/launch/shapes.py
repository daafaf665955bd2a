"""How many ranks one engine is made of, and whether its model's experts can be spread over them.

Pure: flags and a model's config.json in, numbers and sentences out. What vLLM's own parser
refuses with a line of its own (a size that is no number) is not looked at here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.launch.errors import LaunchError
from baton.numbers import MOST_RANKS, decimal

_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""What configs call the number of experts (vllm 0.32, transformers_utils/model_arch_config_convertor.py)."""

_MOST_EXPERTS = 1 << 16
"""More is a mistake in a config, and is left to vLLM."""


@dataclass(frozen=True)
class Ranks:
    """The parallel ranks of one engine.

    Attributes:
        tensor, pipeline, data: the sizes of the three.
        local: data parallel ranks that this process starts.
        first: the number of the first of them.
        spread: whether experts are spread over all ranks (expert parallelism) and not each cut into pieces.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    local: int = 1
    first: int = 0
    spread: bool = False

    @property
    def workers(self) -> int:
        """Worker processes that this process starts: each has weights, a KV cache and threads of its own."""
        return self.tensor * self.pipeline * self.local


def ranks_of(args: Sequence[str]) -> Ranks:
    """The ranks that vLLM's flags ask for, in long or short words."""
    return _ranks_of(tuple(args))


@functools.lru_cache(maxsize=1024)
def _ranks_of(args: tuple[str, ...]) -> Ranks:
    """Remembered: the engines of a large plan are asked for in the same words, and each is looked at many times."""
    data = _size(args, "--data-parallel-size", "-dp") or 1
    # One rank a process when somebody outside shares the requests out.
    own = _number(args, "--data-parallel-rank", "-dpn")
    alone = own is not None or "--data-parallel-external-lb" in args or "-dpe" in args
    start = _number(args, "--data-parallel-start-rank", "-dpr")
    return Ranks(
        tensor=_size(args, "--tensor-parallel-size", "-tp") or 1,
        pipeline=_size(args, "--pipeline-parallel-size", "-pp") or 1,
        data=data,
        local=1 if alone else _size(args, "--data-parallel-size-local", "-dpl") or data,
        first=own or start or 0,
        spread="--enable-expert-parallel" in args or "-ep" in args,
    )


def check_ranks(args: Sequence[str]) -> None:
    """See that there are not so many ranks that looking at each takes for ever.

    Raises:
        LaunchError: there are.
    """
    sizes = ("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"), ("--data-parallel-size", "-dp")
    for names in (*sizes, ("--data-parallel-size-local", "-dpl")):
        size = _size(args, *names)
        if size is not None and size > MOST_RANKS:
            raise LaunchError(f"{names[0]} {size} is more than {MOST_RANKS} ranks: give fewer")
    workers = ranks_of(args).workers
    if workers > MOST_RANKS:
        raise LaunchError(f"the parallel sizes of one engine come to {workers} workers, and {MOST_RANKS} is the most")


def side_channels(port: int, ranks: Ranks) -> dict[int, str]:
    """The ports of an engine's side channel from *port* on, one a data parallel rank, and what each is called."""
    if ranks.data == 1:
        return {port: "side channel"}
    return {port + rank: f"side channel of rank {rank}" for rank in range(ranks.first, ranks.first + ranks.local)}


def experts_of(config: Mapping[str, Any]) -> int:
    """How many experts a model has in a layer; 0 for a dense one."""
    for name in _EXPERTS:
        count = config.get(name)
        if isinstance(count, list) and count:
            count = count[0]
        if isinstance(count, int) and 0 < count <= _MOST_EXPERTS:
            return count
    blocks = [block for block in config.get("block_configs") or () if isinstance(block, dict)]
    counts = (block.get("n_routed_experts") for block in blocks)
    return max((each for each in counts if isinstance(each, int) and each <= _MOST_EXPERTS), default=0)


def experts_problem(config: Mapping[str, Any], model: str, args: Sequence[str], *, on_cpu: bool) -> str | None:
    """Why a model's experts cannot be spread over the ranks that *args* ask for, or None.

    Args:
        config: the model's; an empty one is not checked.
        model: what the user calls it.
        on_cpu: whether vLLM's CPU kernels run it; those for quantized experts cannot leave any out
            (engine/experts.py).
    """
    ranks = ranks_of(args)
    if not ranks.spread or not config:
        return None
    experts = experts_of(config)
    if not experts:
        kind = ", ".join(config.get("architectures") or ()) or config.get("model_type") or "of an unknown kind"
        return (
            f"--enable-expert-parallel spreads experts over ranks, and {model} ({kind}) has none: "
            "drop the flag, or serve a mixture of experts"
        )
    over = ranks.tensor * ranks.data
    if experts % over:
        fits = ", ".join(str(size) for size in range(1, experts + 1) if not experts % size)
        return (
            f"--enable-expert-parallel cannot spread the {experts} experts of {model} evenly over {over} ranks "
            f"(--tensor-parallel-size {ranks.tensor} x --data-parallel-size {ranks.data}): numbers that fit are {fits}"
        )
    method = quantization(config, args)
    if on_cpu and method:
        return (
            f"--enable-expert-parallel on CPU spreads unquantized experts only, and those of {model} are quantized "
            f"({method}): drop the flag, or serve a model that is not quantized"
        )
    return None


def quantization(config: Mapping[str, Any], args: Sequence[str]) -> str | None:
    """How a model's weights are quantized: by a flag, else by its config; None when they are not."""
    found = config.get("quantization_config")
    stored = found.get("quant_method", "unknown") if isinstance(found, dict) and found else None
    return _value(args, "--quantization", "-q") or stored


def _size(args: Sequence[str], *names: str) -> int | None:
    """A size of 1 or more."""
    return _number(args, *names) or None


def _number(args: Sequence[str], *names: str) -> int | None:
    return decimal(_value(args, *names))


def _value(args: Sequence[str], *names: str) -> str | None:
    """The last value of a flag that has several spellings."""
    found: str | None = None
    for index, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name in names:
            following = args[index + 1] if index + 1 < len(args) else ""
            found = value if equals else following
    return found
