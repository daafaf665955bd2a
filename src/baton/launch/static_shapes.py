"""What is wrong with the sizes of steps that an engine was asked for. Pure: commands in, problems out.

What hangs on vLLM's defaults is looked at by the engine itself, with the same sentences (engine/static/setup.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.engine import STATIC_SHAPES, own_config, static_shapes_asked_for, static_shapes_problems
from baton.launch.commands import Command, flag_value, json_flag
from baton.launch.devices import EngineInstall
from baton.launch.errors import LaunchError
from baton.launch.planned import size, whole
from baton.launch.problem import Problem
from baton.launch.shapes import ranks_of


def check_static_shapes(commands: Iterable[Command], install: EngineInstall) -> list[Problem]:
    """A problem for each wrong size and combination, of any of the engines."""
    found = (what for command in commands for what in _problems(command, install))
    return [Problem(what, words=True) for what in dict.fromkeys(found)]


def _problems(command: Command, install: EngineInstall) -> list[str]:
    try:
        config = own_config(json_flag(command.argv, "--additional-config"))
    except (ValueError, LaunchError) as error:
        return [str(error)]
    if command.environ.get(STATIC_SHAPES) != "1" and not static_shapes_asked_for(config):
        # A word about them that is wrong is one about nothing, but still wrong.
        return static_shapes_problems(config)
    found = static_shapes_problems(
        config,
        max_tokens=size(flag_value(command.argv, "--max-num-batched-tokens")),
        max_seqs=whole(flag_value(command.argv, "--max-num-seqs")),
        max_len=size(flag_value(command.argv, "--max-model-len")),
    )
    # On Trainium the Neuron plugin reads these sizes, and has a runner of its own.
    if install.device != "cpu" and (install.device != "neuron" or command.environ.get(STATIC_SHAPES) == "1"):
        found.append(f"--static-shapes has no runner for this engine's device ({install.device}): drop it there")
    policy = flag_value(command.argv, "--scheduling-policy") or "fcfs"
    if policy != "fcfs":
        found.append(f"--scheduling-policy is {policy}: static shapes keep to fcfs; leave it out")
    stages = ranks_of(command.argv).pipeline
    if stages > 1:
        found.append(f"--pipeline-parallel-size is {stages}: static shapes need 1; use --tensor-parallel-size")
    return found
