"""What a LoRA is published with: a model card, and metadata in the file that other programs and CivitAI read.

Pure: nothing is written or sent. The card's data follows Hugging Face's model cards
(https://huggingface.co/docs/hub/model-cards), with its template for LoRAs of diffusion models. The metadata follows
sd-scripts (`ss_*`), which CivitAI and the usual interfaces read, and ModelSpec 1.0.0 (`modelspec.*`,
https://github.com/Stability-AI/ModelSpec). What the trainer wrote stays; only what is missing is added. A path of the
trainer's machine is replaced by its last part: it may hold a user's name.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import presets
from presets.tables import downloads
from runs.files import RunError
from runs.results import Lora, Sample
from runs.spec import RunSpec

TEMPLATE = Path(__file__).with_name("templates") / "card.md"
TAGS = ("lora", "text-to-image", "template:diffusion-lora")
PATH = re.compile(r"(?<![\w:/.\\])(?:[A-Za-z]:[\\/]+|~?[\\/]+)(?:[^\\/\n\"']+[\\/]+)+")
MAX_TAGS = 2000  # in ss_tag_frequency
MAX_TEXT = 4000


@dataclass(frozen=True)
class Licence:
    """A licence as the hub names it. license_name, license_link: of one that it does not know, which is "other"."""

    label: str
    license: str
    license_name: str | None = None
    license_link: str | None = None


@dataclass(frozen=True)
class Card:
    """What a person chooses for the card. samples: images with prompts, in the order of the card; repo: OWNER/NAME."""

    title: str
    base_model: str
    licence: Licence
    description: str = ""
    samples: tuple[tuple[Path, str], ...] = ()
    repo: str = ""


def licences() -> dict[str, Licence]:
    """The licences to choose from, by key."""
    return {key: Licence(**one) for key, one in presets.read_table("licences.toml")["licences"].items()}


def licence_of(model: str) -> str:
    """The key of the licence under which a base model's LoRAs are usually published; "" where none is known."""
    return str(presets.read_table("licences.toml")["models"].get(presets.models()[model]["licence"], ""))


def base_model_of(model: str) -> str:
    """The hub repository of a base model; "" where it has none."""
    entry = presets.models()[model]
    if entry["generated"]:
        return ""
    main = next(iter(entry["files"].values()), "")
    return str(entry["repo"] or downloads().get(main, {}).get("repo", ""))


def sample_name(number: int, path: Path) -> str:
    """The name of a sample in the repository."""
    return f"images/sample-{number:02d}{path.suffix.lower()}"


def readme(spec: RunSpec, lora: Lora, weight_name: str, card: Card, images: int) -> str:
    """The model card as Markdown with its data in front. weight_name: the LoRA's name in the repository.

    Raises:
        RunError: the base model is not a repository's id.
    """
    from huggingface_hub import ModelCard, ModelCardData

    if card.base_model and not re.fullmatch(r"[\w.-]{1,96}/[\w.-]{1,96}", card.base_model):
        raise RunError(f"Base model: {card.base_model[:100]!r} is not a Hugging Face id; write OWNER/NAME or nothing")
    widget = [
        {"text": _line(text) or "-", "output": {"url": sample_name(number, path)}}
        for number, (path, text) in enumerate(card.samples, 1)
    ]
    data = {
        "license": card.licence.license,
        "tags": [*TAGS, presets.models()[spec.model]["family"], "hangproof"],
        "widget": widget,
        "base_model": card.base_model,
        "instance_prompt": _line(spec.trigger),
        "license_name": card.licence.license_name,
        "license_link": card.licence.license_link,
    }
    found = ModelCard.from_template(
        ModelCardData(**{key: value for key, value in data.items() if value}),
        template_path=str(TEMPLATE),
        card=card,
        spec=spec,
        lora=lora,
        weight_name=weight_name,
        images=images,
        plain=plain,
        model=presets.models()[spec.model]["name"],
        trainer=presets.backends()[spec.backend]["label"],
        description=card.description.strip()[:MAX_TEXT],
        trigger=_line(spec.trigger).replace("`", "'"),
        prompt=json.dumps(_line(spec.trigger) or "a photo", ensure_ascii=False),
    )
    return str(found)


def _line(text: str) -> str:
    return re.sub(r"[\x00-\x1f\x7f\u2028\u2029]+", " ", text).strip()[:MAX_TEXT]


def plain(text: str) -> str:
    """Text that Markdown and HTML show as it is."""
    return re.sub(r"([\\`*_{}\[\]()#+!|~>-])", r"\\\1", _line(text).replace("&", "&amp;").replace("<", "&lt;"))


def completed_metadata(
    metadata: dict[str, str], spec: RunSpec, card: Card, weight_name: str, captions: Iterable[str]
) -> dict[str, str]:
    """The metadata of the published file: the trainer's, without paths, and what is missing of what CivitAI reads."""
    model = presets.models()[spec.model]
    # How many captions have each tag, as sd-scripts counts them: a tag is what stands between commas.
    tags = Counter(tag for caption in captions for tag in {*map(str.strip, caption.split(","))} if tag)
    added = {
        "ss_output_name": Path(weight_name).stem,
        "ss_sd_model_name": model["name"],
        "ss_network_dim": str(spec.rank),
        "ss_network_alpha": f"{spec.alpha:g}",
        "ss_learning_rate": f"{spec.learning_rate:g}",
        "ss_seed": str(spec.seed),
        "ss_tag_frequency": json.dumps({spec.slug: dict(tags.most_common(MAX_TAGS))}, ensure_ascii=False),
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.title": _line(card.title),
        "modelspec.description": _line(card.description),
        "modelspec.license": card.licence.license_name or card.licence.license,
        "modelspec.trigger_phrase": _line(spec.trigger),
        "modelspec.usage_hint": f"Use {_line(spec.trigger)} in the prompt." if spec.trigger else "",
    }
    kept = {key: PATH.sub("", value) for key, value in metadata.items()}
    return {**{key: value for key, value in added.items() if value}, **{k: v for k, v in kept.items() if v}}


def samples_for(lora: Lora, samples: Iterable[Sample]) -> list[Sample]:
    """The samples that show a LoRA best: those drawn when it was saved, else the last of each prompt; by prompt."""
    numbered = [one for one in samples if one.prompt >= 0 and one.number]
    of_lora = [one for one in numbered if (one.unit, one.number) in (("step", lora.step), ("epoch", lora.epoch))]
    found = {one.prompt: one for one in sorted(of_lora or numbered, key=lambda one: (one.number, one.drawn))}
    return [found[prompt] for prompt in sorted(found)]
