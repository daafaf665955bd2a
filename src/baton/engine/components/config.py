"""Which components share their weights over how many replicas, and what is wrong with that.

Pure: values in, words out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

COMPONENTS = ("attention", "embedding", "mlp", "lm_head")

DENSE = ("LlamaForCausalLM", "LLaMAForCausalLM", "Qwen3ForCausalLM")
EXPERTS = ("Qwen3MoeForCausalLM",)
"""Architectures whose layers are known: vllm 0.32, model_executor/models/{llama,qwen3,qwen3_moe}.py."""

VOCABULARY_PADDING = 64
"""vLLM rounds a vocabulary up to a multiple of it (vllm 0.32, layers/vocab_parallel_embedding.py)."""

COMPONENTS_UNFIT = (
    "--compilation-config",
    "--decode-context-parallel-size",
    "--enable-lora",
    "--enable-prompt-embeds",
    "--no-enforce-eager",
    "--pipeline-parallel-size",
    "--prefill-context-parallel-size",
    "--quantization",
    "--speculative-config",
)
"""Flags of `vllm serve` that do not go together with component data parallelism."""


@dataclass(frozen=True)
class ComponentSizes:
    """Over how many replicas each component's weights are shared out, beside the tensor parallel ranks; 1 is off."""

    attention: int = 1
    embedding: int = 1
    mlp: int = 1
    lm_head: int = 1

    def items(self) -> Iterator[tuple[str, int]]:
        """Name and size of each component."""
        for field in fields(self):
            yield field.name, getattr(self, field.name)

    @property
    def active(self) -> dict[str, int]:
        """Those that are on, by the name of their parameter."""
        return {parameter(name): size for name, size in self.items() if size > 1}


@dataclass(frozen=True)
class EngineFacts:
    """What an engine will run as.

    Attributes:
        tensor: its tensor parallel size.
        data: its data parallel size.
        kv_role: of its ``kv_transfer_config``; None when it has none.
        spread: whether experts are spread over ranks (``--enable-expert-parallel``).
        unfit: those of :data:`COMPONENTS_UNFIT` that were given.
        on_cpu: whether it runs on vLLM's CPU platform.
        external: whether somebody outside shares its requests out among replicas that are processes of their own.
    """

    tensor: int
    data: int
    kv_role: str | None
    spread: bool = False
    unfit: tuple[str, ...] = ()
    on_cpu: bool = True
    external: bool = False


def parameter(component: str) -> str:
    """What the user calls the size of *component*."""
    return f"{component}_dp_size"


def component_sizes(own: Mapping[str, Any]) -> tuple[ComponentSizes, list[str]]:
    """The sizes in *own* (:func:`baton.engine.own_config.own_config`), and what is wrong with their values."""
    sizes: dict[str, int] = {}
    problems = []
    for component in COMPONENTS:
        name = parameter(component)
        value = own.get(name, 1)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            sizes[component] = value
        else:
            problems.append(f"{name} {value!r} is not a whole number of 1 or more: give one, or leave it out")
    return ComponentSizes(**sizes), problems


def component_problems(sizes: ComponentSizes, engine: EngineFacts, model: Mapping[str, Any]) -> list[str]:
    """Everything that keeps an engine from sharing its components' weights as *sizes* say; empty when none are on.

    Args:
        model: its config.json; what it does not say is not checked, an empty one not at all.
    """
    if not sizes.active:
        return []
    return [*_engine_problems(sizes, engine), *_model_problems(sizes, engine, model)]


def _engine_problems(sizes: ComponentSizes, engine: EngineFacts) -> Iterator[str]:
    asked = ", ".join(f"{name} {size}" for name, size in sizes.active.items())
    if not engine.on_cpu:
        yield f"{asked}: component data parallelism runs on vLLM's CPU platform only so far; leave it out"
    if engine.kv_role not in ("kv_consumer", "kv_both"):
        yield (
            f"{asked}: component data parallelism is for decode servers, and this one's kv_role is {engine.kv_role}: "
            "give it to --role decode only"
        )
    if engine.data < 2:
        yield (
            f"{asked}: replicas share weights, and there is one: "
            f"give --data-parallel-size {max(sizes.active.values())}, or leave it out"
        )
    else:
        for name, size in sizes.active.items():
            if engine.data % size:
                yield (
                    f"{name} {size} does not divide --data-parallel-size {engine.data}: "
                    f"sizes that fit are {_words(_divisors(engine.data))}"
                )
    for flag in engine.unfit:
        yield f"{asked}: component data parallelism does not go together with {flag}; drop one of them"


def _model_problems(sizes: ComponentSizes, engine: EngineFacts, model: Mapping[str, Any]) -> Iterator[str]:
    kinds = model.get("architectures") or ()
    if not kinds:
        return
    asked = ", ".join(f"{name} {size}" for name, size in sizes.active.items())
    if kinds[0] not in (*DENSE, *EXPERTS):
        yield f"{asked}: {kinds[0]} is not supported; models that are: {', '.join((*DENSE, *EXPERTS))}"
        return
    if kinds[0] in DENSE and engine.external:
        yield (
            f"{asked}: vLLM does not let somebody outside share requests out among replicas of a dense model; "
            "drop --data-parallel-rank and --data-parallel-external-lb"
        )
    if model.get("quantization_config") and "--quantization" not in engine.unfit:
        yield f"{asked}: the model's weights are quantized, which component data parallelism does not do; leave it out"
    if kinds[0] in EXPERTS:
        if sizes.mlp > 1:
            yield (
                f"mlp_dp_size {sizes.mlp}: the experts of {kinds[0]} are shared out by --enable-expert-parallel; "
                "leave mlp_dp_size out"
            )
        if not engine.spread:
            yield f"{asked}: replicas of {kinds[0]} share their experts out: add --enable-expert-parallel"
    if model.get("tie_word_embeddings") and sizes.embedding != sizes.lm_head:
        yield (
            f"embedding_dp_size {sizes.embedding} and lm_head_dp_size {sizes.lm_head}: the model has one matrix for "
            "both (tie_word_embeddings); give both the same size"
        )
    yield from _uneven(sizes, engine, model)


def _uneven(sizes: ComponentSizes, engine: EngineFacts, model: Mapping[str, Any]) -> Iterator[str]:
    """What of a model does not divide by the ranks that share it."""
    vocabulary = _natural(model, "vocab_size")
    padded = -(-vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING if vocabulary else None
    rows = f"a vocabulary of {vocabulary}" + (f" (padded to {padded})" if padded != vocabulary else "")
    intermediate = None if (model.get("architectures") or ("",))[0] in EXPERTS else _natural(model, "intermediate_size")
    for component, count, what in (
        ("attention", _natural(model, "num_attention_heads"), "{} attention heads"),
        ("mlp", intermediate, "an intermediate size of {}"),
        ("embedding", padded, rows),
        ("lm_head", padded, rows),
    ):
        size = getattr(sizes, component)
        if size > 1 and count is not None and count % (engine.tensor * size):
            fits = [each for each in _divisors(engine.data) if not count % (engine.tensor * each)]
            why = f"{what.format(count)}, which does not divide by them"
            yield _does_not_fit(component, sizes, engine, why, fits)
    heads, kv_heads = _natural(model, "num_attention_heads"), _natural(model, "num_key_value_heads")
    ranks = engine.tensor * sizes.attention
    if sizes.attention > 1 and heads and not heads % ranks and kv_heads and kv_heads % ranks and ranks % kv_heads:
        fits = [
            each
            for each in _divisors(engine.data)
            if not heads % (ranks := engine.tensor * each) and not (kv_heads % ranks and ranks % kv_heads)
        ]
        why = f"{kv_heads} key-value heads: one must be a multiple of the other"
        yield _does_not_fit("attention", sizes, engine, why, fits)


def _does_not_fit(component: str, sizes: ComponentSizes, engine: EngineFacts, why: str, fits: list[int]) -> str:
    size = getattr(sizes, component)
    remedy = f"sizes that fit are {_words(fits)}" if fits else "leave it out"
    return (
        f"{parameter(component)} {size} with --tensor-parallel-size {engine.tensor} makes "
        f"{engine.tensor * size} ranks, and the model has {why}; {remedy}"
    )


def _natural(model: Mapping[str, Any], name: str) -> int | None:
    value = model.get(name)
    return value if isinstance(value, int) and value > 0 else None


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if not number % each]


def _words(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
