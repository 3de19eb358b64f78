"""`python -m launch publish RUN --repo OWNER/NAME`: put a run's LoRA on Hugging Face, with a card and its samples.

Private unless `--public`. The token is the hub library's own login; it is in no file, log or address of ours. The
library sends everything as one commit, and not again what the hub has already. The LoRA is a copy in the hidden folder
`.publish` of the run, with complete metadata and without paths of this machine. Every request has a time limit. Xet is
off: its transfers have no limit that we can set.
"""

import argparse
import contextlib
import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import runs
from guards import hub
from launch import common
from launch.common import LaunchError
from monitor.run_folder import read_json
from runs import manage, model_card, results
from runs.files import atomic_write, explained
from runs.paths import datasets_dir

FOLDER = ".publish"
RESULT = "published.json"
SAMPLES = 6
REQUEST_S = 60.0  # for one read or write of a connection
IMAGE_BYTES = 20_000_000
README = "README.md"
REFUSED = {
    **dict.fromkeys((401, 403), "Hugging Face refuses. Often, the token may not write there; log in with one that may"),
    404: "Hugging Face knows no such account or repository, or the token may not see it; check the name",
    429: "Hugging Face limits the number of requests; start it again later",
}
OURS = "hangproof"  # the tag by which a card is known as ours

OPTIONS = (
    common.RUN,
    ("--repo OWNER/NAME", "", "repository; default: your account and the run's name"),
    ("--lora FILE", "", "one of the run's LoRA files; default: the final one"),
    ("--public", False, "everyone can see the repository; default: private"),
    ("--title TEXT", "", "title of the card; default: the run's name"),
    ("--description TEXT", "", "text of the card (Markdown)"),
    ("--base-model ID", None, "hub id of the base model; default: known from the run"),
    ("--licence KEY", "", f"one of {', '.join(model_card.licences())}; default: the base model's"),
    ("--samples N", SAMPLES, f"most sample images on the card (default {SAMPLES})"),
    ("--replace-card", False, "replace a card that somebody wrote by hand"),
    ("--preview", False, "print the card and end; nothing is sent"),
)


def run(args: argparse.Namespace) -> int:
    """Publish the LoRA; with --preview, print its card. Raises LaunchError, RunError."""
    folder = runs.run_folder(args.run)
    if args.preview:
        text = preview(folder, vars(args))
        return common.report(args, text, {"card": text})
    result = publish(folder, args.repo, args.public, args.replace_card, vars(args))
    return common.report(args, f"Published: {result['url']}", result)


def choices(folder: Path) -> dict[str, Any]:
    """What can be chosen for a run: {"loras": [{name, at, bytes}], "licences": {key: label}, "licence", "base_model",
    "title", "repo", "token" (whether there is one), "published"}."""
    spec = runs.load(folder)
    title, repo = manage.label_of(folder) or spec.name, folder.name
    with contextlib.suppress(runs.RunError):  # a label without letters
        repo = runs.slug(title)
    return {
        "loras": [{"name": one.path.name, "at": one.at, "bytes": one.size} for one in results.loras(folder)],
        "licences": {key: one.label for key, one in model_card.licences().items()},
        "licence": model_card.licence_of(spec.model),
        "base_model": model_card.base_model_of(spec.model),
        "title": title,
        "repo": repo,
        "token": bool(hub.token()),
        "published": published(folder),
    }


def published(folder: Path) -> dict[str, Any] | None:
    """What was published of a run last: {"repo", "url", "commit", "lora", "private", "utc"}; None for nothing."""
    value = read_json(folder / RESULT)
    return value if value and value.keys() >= {"repo", "url", "commit", "lora", "private", "utc"} else None


def preview(folder: Path, options: dict[str, Any]) -> str:
    """The card as Markdown. Raises LaunchError, RunError."""
    return _chosen(folder, options)[2]


def publish(folder: Path, repo: str, public: bool, replace_card: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Send a run's LoRA, card and samples to the hub, and print what is done; what `published` returns.

    repo: OWNER/NAME, NAME, or "" for the run's name. options: see `OPTIONS`.

    Raises LaunchError: not logged in, refused, no connection, a card that somebody else wrote. RunError: the run has no
    such LoRA, or it is damaged.
    """
    if hub.offline():
        raise LaunchError("HF_HUB_OFFLINE is set; unset it to publish")
    if not hub.token():
        how = "on the page: Hugging Face account; or `.venv/bin/hf auth login`"
        raise LaunchError(f"You are not logged in to Hugging Face; log in with a token that may write ({how})")
    from huggingface_hub import CommitOperationAdd

    private, slug = not public, folder.name
    with _hub() as api:
        name = repo if "/" in repo else f"{api.whoami()['name']}/{repo or slug}"
        files = prepare(folder, {**options, "repo": name})
        print(f"Repository {name} ({'private' if private else 'public'})", flush=True)
        url = str(api.create_repo(name, private=private, exist_ok=True))
        seen = api.model_info(name)
        if bool(seen.private) != private:
            now = "private" if seen.private else "public"
            raise LaunchError(f"{name} exists and is {now}; change that on {url}/settings, or choose another name")
        known = [sibling.rfilename for sibling in seen.siblings or []]
        if README in known and OURS not in (seen.tags or []) and not replace_card:
            raise LaunchError(f"{name} has a card that Hangproof did not write; replace it, or choose another name")
        size = (folder / FOLDER / f"{slug}.safetensors").stat().st_size
        print(f"Sending {len(files)} files, the LoRA with {size / 1e6:.1f} MB", flush=True)
        added = [CommitOperationAdd(path, source) for path, source in files.items()]
        done = api.create_commit(name, added, commit_message="Publish the LoRA with its card and samples")
    result = {"repo": name, "url": url, "commit": str(done.oid), "private": private}
    result["lora"] = options.get("lora") or f"{slug}.safetensors"
    result["utc"] = datetime.now(UTC).isoformat(timespec="seconds")
    atomic_write(folder / RESULT, json.dumps(result, ensure_ascii=False))
    shutil.rmtree(folder / FOLDER)
    return result


def prepare(folder: Path, options: dict[str, Any]) -> dict[str, bytes | Path]:
    """What is sent, by name in the repository: contents or path. Raises LaunchError, RunError."""
    from safetensors import safe_open
    from safetensors.torch import save  # `save_file` has an error of its own for a full disk

    lora, card, text = _chosen(folder, options)
    spec, name = runs.load(folder), f"{folder.name}.safetensors"
    complete = folder / FOLDER / name
    captions = runs.read_captions(spec.slug).values() if (datasets_dir() / spec.slug).is_dir() else ()
    with explained(f"prepare {complete}"), safe_open(lora.path, framework="pt") as file:
        complete.parent.mkdir(exist_ok=True)
        metadata = model_card.completed_metadata(file.metadata() or {}, spec, card, name, captions)
        atomic_write(complete, save({key: file.get_tensor(key) for key in file.keys()}, metadata))  # noqa: SIM118
    samples = {model_card.sample_name(number, path): path for number, (path, _) in enumerate(card.samples, 1)}
    return {README: text.encode(), name: complete, **samples}


def _chosen(folder: Path, options: dict[str, Any]) -> tuple[results.Lora, model_card.Card, str]:
    """The LoRA, its card, and that as Markdown. Raises LaunchError: there is no such LoRA or licence; RunError."""
    spec = runs.load(folder)
    loras, wanted = results.loras(folder), options.get("lora") or ""
    lora = next((one for one in loras if wanted in ("", one.path.name)), None)
    if lora is None:
        what = f"no LoRA {wanted[:100]!r}" if wanted else "no LoRA yet"
        raise LaunchError(f"{folder.name} has {what}; choose one of: {', '.join(o.path.name for o in loras) or 'none'}")
    key = options.get("licence") or model_card.licence_of(spec.model) or "that of the base model"
    known = model_card.licences()
    if key not in known:
        raise LaunchError(f"Licence: {key[:100]} is not known; choose one of {', '.join(known)} (--licence KEY)")
    base, most = options.get("base_model"), options.get("samples")
    most = SAMPLES if most is None else int(most)
    if not 0 <= most <= 24:
        raise LaunchError("Samples: choose a number from 0 to 24")
    prompts = {one.number: one.text for one in results.read_prompts(folder / "sample_prompts.txt")}
    pictures = [
        (one.path, prompts.get(one.prompt, ""))
        for one in model_card.samples_for(lora, results.read_samples(folder / "sample"))
        if one.path.is_file() and not one.path.is_symlink() and one.path.stat().st_size <= IMAGE_BYTES
    ][:most]
    card = model_card.Card(
        title=options.get("title") or manage.label_of(folder) or spec.name,
        base_model=model_card.base_model_of(spec.model) if base is None else base.strip(),
        licence=known[key],
        description=options.get("description") or "",
        samples=tuple(pictures),
        repo=options.get("repo") or "",
    )
    count = len(runs.images_in(datasets_dir() / spec.slug))
    return lora, card, model_card.readme(spec, lora, f"{spec.slug}.safetensors", card, count)


@contextlib.contextmanager
def _hub() -> Iterator[Any]:
    """The hub's client with a limit on every wait: its own has none (huggingface_hub/utils/_http.py).

    Raises LaunchError: it refuses, or does not answer.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import httpx
    from huggingface_hub.utils._http import default_client_factory

    def client() -> httpx.Client:
        made = default_client_factory()
        made.timeout = httpx.Timeout(REQUEST_S)
        return made

    huggingface_hub.constants.HF_HUB_DISABLE_XET = True  # its variable counts only before the first import
    huggingface_hub.set_client_factory(client)
    try:
        yield huggingface_hub.HfApi(endpoint=hub.endpoint(), token=hub.token())
    except HFValidationError as error:
        raise LaunchError(f"{error} Write it as OWNER/NAME") from error
    except (HfHubHTTPError, httpx.HTTPError, RuntimeError) as error:
        # An upload raises a RuntimeError from the real error.
        cause = error.__cause__ if type(error) is RuntimeError else error
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            status, said = cause.response.status_code, " ".join((cause.server_message or "").split())[:300]
            again = "; start it again later" if status >= 500 else ""
            reason = REFUSED.get(status, f"Hugging Face answered with HTTP status {status}{again}")
            reason += f". Hugging Face says: {said}" if said else ""
        elif isinstance(cause, httpx.HTTPError):
            why = f"cannot be reached or does not answer ({type(cause).__name__}); start it again later"
            reason = f"{hub.shown()} {why}"
        else:
            raise
        raise LaunchError(reason) from error
