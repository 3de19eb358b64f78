"""`python -m launch COMMAND …`: write a run for another place, submit it there, keep it in a store.

A command is one row of COMMANDS: its module has OPTIONS (`launch.common.add_arguments`) and `run(args) -> int`, and is
imported only when the command is called, so that a command which sleeps beside a training stays small and an optional
library is needed only by the command that uses it. `--json` is added here, and `launch.common.report` honors it.
"""

import argparse
import importlib
import sys

from launch.common import add_arguments
from presets import terminal

# name: (module, what it does)
COMMANDS = {
    "slurm": ("launch.slurm", "write the sbatch script of a run, and submit it"),
    "skypilot": ("launch.skypilot", "write the managed job of a run for SkyPilot, and submit it"),
    "rehearse": ("launch.rehearse", "try a run on the real model for two minutes: does it train, what does it need"),
    "drill": ("launch.drill", "train the demo run and freeze it, to see the recovery"),
    "store": ("launch.store.commands", "restore a run from its store, show the store, take a dead machine's lease"),
    "fleet": ("launch.fleet", "show the runs on other machines, read from their stores; stop one"),
    "docker": ("launch.containers", "write the compose file that trains a run in a container, and start it"),
    "runpod": ("launch.rent", "write the pod of a run for RunPod, and rent it"),
    "vast": ("launch.skypilot", "write the managed job of a run for SkyPilot on Vast.ai, and submit it"),
    "publish": ("launch.publish", "put a run's LoRA on Hugging Face, with a card and its samples"),
    "bundle": ("launch.bundle", "write a run as one ZIP that trains wherever there is Python"),
    "train": ("launch.train", "write a run's script for this machine and supervise it: in a container, in a bundle"),
    "serve": ("launch.serve", "what a container runs: continue interrupted runs, serve the page"),
    "stop-pod": ("launch.rent", "stop the pod of RunPod that this runs on"),
}


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: done. 1: failed, with the reason on standard error. 2: wrong usage."""
    words = sys.argv[1:] if argv is None else argv
    top = argparse.ArgumentParser(prog="python -m launch", description="Train a run elsewhere, or keep it in a store.")
    choices = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        command = choices.add_parser(name, help=text, description=text)
        if [name] == words[:1]:
            add_arguments(command, importlib.import_module(module))
            command.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    args = top.parse_args(words)

    from presets import PresetError
    from runs.files import RunError

    try:
        return importlib.import_module(COMMANDS[args.command][0]).run(args)
    except (PresetError, RunError, OSError) as error:
        print(f"launch {args.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(terminal.command(main))
