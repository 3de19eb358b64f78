"""`python -m jobs queue|delete|sweep`: what concerns a run's place in the queue."""

import argparse
import json
import os
import sys
from dataclasses import asdict

import runs
from jobs import queue
from monitor.process.spawned import idle
from monitor.run_folder import MonitorError, find
from monitor.state import nothing_left
from presets import PresetError, terminal
from runs import manage, sweep

ACTIONS = ("list", "add", "start", "move", "cancel", "now", "work")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m jobs", description="Queue, sweep and delete runs.")
    commands = top.add_subparsers(dest="command", required=True)
    order = terminal.add_command(
        commands, "queue", "show the runs that wait for the GPU; add, move, cancel or start one"
    )
    order.add_argument(
        "action", nargs="?", default="list", choices=ACTIONS, help="default: list; start: now if possible"
    )
    order.add_argument("run", nargs="?", metavar="RUN", help="name of a run, or of a sweep")
    order.add_argument("position", nargs="?", type=int, metavar="POSITION", help="of `move`, from 1")
    delete = terminal.add_command(commands, "delete", "delete a run with its LoRA files, checkpoints, samples and log")
    delete.add_argument("run", help="name or folder of a run")
    delete.add_argument("--images", action="store_true", help="also delete its data set: images and captions")
    delete.add_argument("--yes", action="store_true", help="do not ask")
    several = terminal.add_command(commands, "sweep", "make and queue runs that differ in a few numbers")
    several.add_argument("run", help="the run to start from")
    several.add_argument(
        "--set", action="append", required=True, metavar="FIELD=VALUE,VALUE", help="such as rank=8,16; can be repeated"
    )
    several.add_argument("--no-queue", action="store_true", help="make the runs, and start none")
    for command in (order, delete, several):
        command.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    return top


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: done. 1: failed, with the reason on standard error. 2: wrong usage."""
    args = parser().parse_args(argv)
    try:
        return {"queue": change_queue, "delete": delete_run, "sweep": make_sweep}[args.command](args)
    except (runs.RunError, PresetError, OSError) as error:
        print(f"jobs: {error}", file=sys.stderr)
        return 1


def change_queue(args: argparse.Namespace) -> int:
    """Change the queue or show it. Raises MonitorError, OSError."""
    action, word = args.action, args.run
    if action == "work":
        return queue.work()
    if action != "list" and not word:
        parser().error(f"name the run: python -m jobs queue {action} RUN")
    if action == "add":
        folder = find(word)
        print(f"{folder.name}: position {queue.add(folder)} in the queue")
    elif action == "start":
        folder = find(word)
        answer = queue.start_or_wait(folder)
        waits = f"position {answer['position']} in the queue" if answer["position"] else ""
        watched = f"watched by process {answer['pid']}" if answer["pid"] else ""
        print(f"{folder.name}: {waits or watched or nothing_left(folder)}")
    elif action == "move":
        if args.position is None:
            parser().error(f"name the position, from 1: python -m jobs queue move {word} 1")
        print(f"{word}: position {queue.move(_name(word), args.position)} in the queue")
        queue.ensure_worker()
    elif action == "cancel":
        stopped = queue.cancel(_name(word))
        print(f"{word}: removed from the queue" + (f"; stopping {', '.join(stopped)}" if stopped else ""))
    elif action == "now":
        paused = queue.run_now(_name(word))
        print(f"{word}: starts next" + (f"; paused for it: {', '.join(paused)}" if paused else ""))
    entries = queue.read().entries
    if action == "list":
        for number, entry in enumerate(entries, 1):
            left = f", {entry.total - len(entry.sweep)} of {entry.total} started" if entry.sweep else ""
            print(f"{number}. {entry.run}{left}" + (f": {entry.problem}" if entry.problem else ""))
        if not entries:
            print("no run waits")
    if args.json:
        print(json.dumps([asdict(entry) for entry in entries]))
    return 0


def _name(word: str) -> str:
    """The name that an entry has: the word itself, or the folder of the run that it names."""
    if any(entry.run == word for entry in queue.read().entries):
        return word
    try:
        return find(word).name
    except MonitorError:
        return os.path.basename(word)


def delete_run(args: argparse.Namespace) -> int:
    """Delete a run after a question, which `--yes` answers."""
    used = manage.usage(args.run)
    size = used.run_bytes + (used.images_bytes if args.images else 0)
    what = f"{args.run}{' and its data set' if args.images else ''}: this frees {manage.size_text(size)}"
    if not args.yes:
        if not sys.stdin.isatty():
            raise runs.RunError(f"{what}; add --yes to delete it")
        if input(f"Delete {what}. Type yes to delete: ").strip().lower() != "yes":
            raise runs.RunError(f"{args.run} was not deleted")
    name = runs.run_folder(args.run).name
    freed = manage.delete(args.run, idle, args.images)
    queue.forget(name)
    print(f"{args.run}: deleted, {manage.size_text(freed)} freed")
    if args.json:
        print(json.dumps({"freed_bytes": freed}))
    return 0


def make_sweep(args: argparse.Namespace) -> int:
    """Make the runs of a sweep and put them into the queue as one entry."""
    base, values = runs.load(runs.run_folder(args.run)), sweep.parse(args.set)
    made = sweep.create(base.name, sweep.combinations(base, values), values, runs.datasets_dir() / base.slug)
    if not args.no_queue:
        queue.add_sweep(made)
        queue.ensure_worker()
    names = [run for run, _ in made.runs]
    print(f"{made.name}: {len(names)} runs: {', '.join(names)}")
    if args.json:
        print(json.dumps({"sweep": made.name, "runs": names}))
    return 0


if __name__ == "__main__":
    sys.exit(terminal.command(main))
