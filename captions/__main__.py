"""`python -m captions FOLDER --with florence|tagger|endpoint`: writes captions of a folder's images.

`python -m ui.dataset.captioning DRAFT` does the same for a draft of the page.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from captions import endpoint, florence, job, models, tagger
from captions.options import ENGINES, parser
from captions.text import Frame
from captions.work import Folder, Work
from runs.files import RunError


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
        frame = Frame(given.prefix, given.suffix, given.trigger)
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
        ready = endpoint.load(server)
        return lambda: ready
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
        words = frozenset(word for word in given.without.split(",") if word.strip())
        choice = tagger.Choice(given.general, given.character, words, not given.underscores)
        return tagger.load(folder, choice, given.device)

    return load


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
