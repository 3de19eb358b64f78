"""The card of a published LoRA: no text breaks it, and no path of this machine is in it."""

from pathlib import Path

from huggingface_hub import ModelCard
from hypothesis import given, settings, strategies as st

import runs
from runs import model_card


@settings(max_examples=50)
@given(st.text(max_size=200))
def test_no_text_breaks_the_card(text):
    trigger = model_card._line(text)[:100].replace("\0", "") if text.isprintable() else "x"
    card = model_card.Card(text or "-", "", model_card.licences()["mit"], samples=((Path("a.png"), text),))
    lora = model_card.Lora(Path("cat.safetensors"), 1, True, 1, 1)
    found = model_card.readme(runs.RunSpec(name="cat", trigger=trigger), lora, "cat.safetensors", card, 1)
    data = ModelCard(found).data
    assert data.license == "mit" and len(data.widget) == 1
    assert "<script" not in model_card.plain(text).replace("&lt;script", "")


def test_paths_are_reduced_to_their_last_part():
    for text, shown in (
        ("/home/me/models/a.safetensors", "a.safetensors"),
        ('{"dir": "C:\\\\Users\\\\me\\\\a.png"}', '{"dir": "a.png"}'),
        ("see https://huggingface.co/a/b", "see https://huggingface.co/a/b"),
        ("1/2 and 3/4", "1/2 and 3/4"),
        ("~/secret/b.txt", "b.txt"),
    ):
        assert model_card.PATH.sub("", text) == shown


def test_a_base_model_is_named_by_its_repository_or_that_of_its_main_file():
    names = ("flux-dev", "flux2-dev", "tiny-flux")  # with a repository, with files, made here
    found = [model_card.base_model_of(name) for name in names]
    assert found == ["black-forest-labs/FLUX.1-dev", "black-forest-labs/FLUX.2-dev", ""]
