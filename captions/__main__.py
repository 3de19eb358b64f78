"""`python -m captions FOLDER --with florence|tagger|endpoint`: writes captions of a folder's images.

`python -m ui.dataset.captioning DRAFT` does the same for a draft of the page.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from captions import endpoint, florence, job, models, tagger
from captions.text import framed
from captions.work import Folder, Work
from presets import terminal
from runs.files import RunError

ENGINES = ("florence", "tagger", "endpoint")


def parser() -> argparse.ArgumentParser:
    """The command line. The page stores the same options, by the names in OPTIONS, with the draft."""
    top = argparse.ArgumentParser(
        prog="python -m captions",
        description="Write captions of images with a model. An image that has a caption keeps it. A job that was stopped "
        "continues where it was.",
    )
    top.add_argument("target", metavar="FOLDER", help="a folder with images")
    top.add_argument("--with", dest="engine", choices=ENGINES, help="what writes the captions")
    top.add_argument("--model", default="", help="a model of presets/captioners.toml, a folder, or a server's model")
    top.add_argument(
        "--device", choices=("", "cpu", "cuda"), default="", help="default: the GPU when its memory is free"
    )
    top.add_argument(
        "--task", choices=tuple(florence.TASKS), default="detailed", help="florence: how long a caption is"
    )
    top.add_argument("--general", type=float, default=0.35, help="tagger: least probability of a tag")
    top.add_argument("--character", type=float, default=0.85, help="tagger: least probability of a character")
    top.add_argument("--without", default="", help="tagger: tags to leave out, separated by commas")
    top.add_argument("--underscores", action="store_true", help="tagger: keep the underscores of tags")
    top.add_argument("--url", default="", help="endpoint: its address, such as http://127.0.0.1:11434/v1")
    top.add_argument("--prompt", default=endpoint.PROMPT, help="endpoint: what the server is asked")
    top.add_argument(
        "--key-variable", default="", metavar="NAME", help="endpoint: the environment variable with the key"
    )
    top.add_argument("--request-s", type=float, default=120.0, help="endpoint: limit of one request in seconds")
    top.add_argument("--load-s", type=float, default=job.LOAD_S, help="limit for the model to load, in seconds")
    top.add_argument("--image-s", type=float, default=job.IMAGE_S, help="limit for one image, in seconds")
    top.add_argument("--prefix", default="", help="text before each caption")
    top.add_argument("--suffix", default="", help="text after each caption")
    top.add_argument("--trigger", default="", help="the trigger word, put first")
    top.add_argument("--rewrite", action="store_true", help="a folder: also replace the captions that are there")
    top.add_argument("--json", action="store_true", help="print the result as one JSON value at the end")
    return top


OWN = ("help", "target", "rewrite", "json")  # what the page does not store
OPTIONS = [action.dest for action in parser()._actions if action.dest not in OWN]


def checked(options: Any) -> dict[str, Any]:
    """The options that the page stored, if each is one that could have been typed. Raises RunError."""
    known = {action.dest: action for action in parser()._actions if action.dest in OPTIONS}
    if not isinstance(options, dict) or not options.keys() <= known.keys() or options.get("engine") not in ENGINES:
        raise RunError("These are not options of the captions; start them again")
    for name, value in options.items():
        wanted = (int, float) if known[name].type is float else bool if known[name].nargs == 0 else str
        choices = known[name].choices
        if not isinstance(value, wanted) or (choices and value not in choices):
            raise RunError(f"{name}: {value!r} is not a value of this option; start the captions again")
    return options


def folder_work(given: argparse.Namespace) -> tuple[Work, argparse.Namespace]:
    """The images of a folder, and the options."""
    if not given.engine:
        raise RunError(f"Name what writes the captions: --with {'|'.join(ENGINES)}")
    return Folder(Path(given.target), given.rewrite), given


def main(
    argv: Sequence[str],
    work_of: Callable[[argparse.Namespace], tuple[Work, argparse.Namespace]] = folder_work,
) -> int:
    """Run the command; returns its exit code. work_of: the images of the target, and the options for them."""
    given = parser().parse_args(argv)
    try:
        work, given = work_of(given)
        frame = functools.partial(framed, prefix=given.prefix, suffix=given.suffix, trigger=given.trigger)
        report = job.run(work, _loader(given, bool(work.missing())), frame, given.load_s, _image_limit(given))
    except RunError as error:
        print(f"captions: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("captions: stopped; all captions so far are stored", file=sys.stderr)
        return 1
    job.say(job.summary(report))
    if given.json:
        job.say(json.dumps({"written": report.written, "failed": report.failed, "left": report.left}))
    if report.reason:
        print(f"captions: stopped: {report.reason}", file=sys.stderr)
        return 1
    return 0


def _image_limit(given: argparse.Namespace) -> float:
    """The limit of one image; a server's is that of its requests with the pauses between them."""
    if given.engine != "endpoint":
        return float(given.image_s)
    return endpoint.TRIES * (given.request_s + endpoint.LONGEST_PAUSE_S) + 30.0


def _loader(given: argparse.Namespace, needed: bool) -> Callable[[], job.Describe]:
    """What loads the engine. The model's files are fetched here, because a download has limits of its own."""
    if given.engine == "endpoint":
        server = endpoint.Server(given.url, given.model, given.prompt, given.key_variable, given.request_s)
        ask = functools.partial(endpoint.ask, endpoint.checked(server))
        return lambda: ask
    found = models.find(given.engine, given.model)
    if isinstance(found, Path):
        folder, gpu_gb, name = found, 0.0, found.name
    else:
        folder = models.fetch(found, job.say) if needed else Path()
        gpu_gb, name = found.gpu_gb, found.name

    def load() -> job.Describe:
        job.say(f"Loading {name}…")
        if given.engine == "florence":
            return florence.load(folder, given.task, gpu_gb, given.device)
        names = ("general", "character", "without", "underscores")
        return tagger.load(folder, given.device, gpu_gb, **{name: getattr(given, name) for name in names})

    return load


if __name__ == "__main__":
    sys.exit(terminal.command(lambda: main(sys.argv[1:])))
