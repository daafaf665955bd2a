"""Dequantises a GGUF file into a folder that vLLM serves: run as a program, since it loads torch.

usage: python -m baton.models.unpack FILE.gguf FOLDER
Exit codes: 0 done, 1 failed, 3 a package is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path


def unpack(gguf: Path, folder: Path) -> None:
    """Write *gguf*'s model to *folder*: bf16 safetensors, config, tokenizer and chat template.

    Raises:
        ImportError: transformers, gguf, accelerate or torch is missing.
    """
    import accelerate  # noqa: F401
    import gguf as _gguf  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m baton.models.unpack FILE.gguf FOLDER", file=sys.stderr)
        return 2
    try:
        unpack(Path(argv[0]), Path(argv[1]))
    except ImportError as error:
        print(f"unpacking a model needs a package that is missing: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
