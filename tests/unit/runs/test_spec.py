"""Every validation error of a spec is a sentence of our own that names the field; none is pydantic's."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runs_helpers import spec
from strategies import ANY_VALUE

import runs
from runs.spec import UNKNOWN, VALUE, RunSpec

PYDANTIC = re.compile(
    r"Input should|unable to parse|[Vv]alue error|[Ff]ield required|Extra inputs|valid (string|integer|number|list|dict)"
    r"|input_value|input_type|pydantic|errors\.pydantic"
)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"trackers": "x"}, "trackers: Must be one of tensorboard, wandb, trackio, all, or empty"),
        ({"prompts": ["a", 2]}, "prompts: Prompt 2: Must be text"),
        ({"environment": {"A B": "1"}}, "environment: 'A B' cannot be set; use letters, digits and _, and no variable that Hangproof sets"),
        ({"extra": {"sdpa": None}}, f"extra: sdpa: {VALUE}"),
        ({"extra": {"network_dim": 3}}, "extra: network_dim: Set the field rank instead"),
        ({"xyz": 1}, "xyz: Unknown field; remove it"),
        ({"name": "!!!"}, "name: Use at least one letter or digit"),
        ({"name": "con"}, "name: Windows reserves the name con; choose another name"),
        ({"model": "flux-dev2pro"}, "backend: diffusers cannot train flux-dev2pro; use sd-scripts"),
        (
            {"model": "flux-devv"},
            "model: no base model 'flux-devv'; did you mean flux-dev, flux2-dev, flux-dev2pro? You can add your own to models.toml",
        ),
    ],
)  # fmt: skip
def test_a_value_is_refused_in_one_line(fields, line):
    with pytest.raises(runs.RunError) as shown:
        runs.make({"name": "x", "backend": "diffusers", **fields})
    assert str(shown.value) == line


def test_every_wrong_field_has_a_line_and_what_no_command_line_can_hold_is_refused():
    with pytest.raises(runs.RunError) as shown:
        runs.make({"name": "x", "rank": 0, "alpha": "a", "tier": "1G"})
    assert [line.partition(":")[0] for line in str(shown.value).splitlines()] == ["tier", "rank", "alpha"]
    for fields, message in (
        ({"extra": {"--bad": 1}}, "without dashes"),
        ({"extra": {"network_args": ["-x"]}}, "cannot start with a dash"),
        ({"trigger": "a\0b"}, "trigger: Contains a NUL"),
        ({"prompts": ["a", "a\0b"]}, "prompts: Prompt 2: Contains a NUL"),
        ({"environment": {"A": "a\0b"}}, "environment: A: Contains a NUL"),
        ({"extra": {"b": ["a\0b"]}}, "extra: b: Contains a NUL"),
    ):
        with pytest.raises(runs.RunError, match=message):
            runs.make({"name": "x", **fields})


value = ANY_VALUE | st.binary(max_size=4) | st.dictionaries(st.integers(), ANY_VALUE, max_size=3)


@settings(max_examples=150, deadline=None)
@given(fields=st.dictionaries(st.sampled_from([*RunSpec.model_fields, "rankk"]), value, max_size=6) | value)
def test_no_value_of_any_field_shows_a_sentence_of_pydantic(fields):
    try:
        runs.make(fields)
    except runs.RunError as error:
        for line in str(error).splitlines():
            assert re.match(r"[\w-]+(\.toml)?: |'.*': |\".*\": ", line), line
            assert not PYDANTIC.search(line) and UNKNOWN not in line, line


text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@settings(max_examples=30, deadline=None)
@given(text, text, st.lists(text), st.dictionaries(st.sampled_from(["vae", "clip_l"]), text))
@example("x 🦊", '"\\\n', ["a\tb", "'''"], {"network_args": ["a=1"], "sdpa": False, "vae": "é"})
def test_any_spec_survives_its_file(tmp_path_factory, name, trigger, prompts, extra):
    folder = tmp_path_factory.getbasetemp()
    made = spec(name=f"{name}x", trigger=trigger, prompts=prompts, extra=extra)
    runs.save(folder, made)
    assert runs.load(folder) == made
    assert made.slug.isascii() and 0 < len(made.slug) <= 80 and "/" not in made.slug


def test_an_invalid_run_toml_is_refused_with_its_line_or_field(tmp_path):
    path = tmp_path / "run.toml"
    for content, message in (
        (b"name = \nx = 1", "at line 1"),
        (b'name = "caf\xe9"', "not UTF-8"),
        (b'name = "x"\nrankk = 3', "rankk: Unknown field; did you mean rank"),
        (b'name = "x"\nmodel = "gone"', "no base model 'gone'"),
        (b"rank = 3", "name: Missing; add a value"),
    ):
        path.write_bytes(content)
        with pytest.raises(runs.RunError, match=message.replace("(", r"\(")) as caught:
            runs.load(tmp_path)
        assert str(path) in str(caught.value)
    path.unlink()
    with pytest.raises(runs.RunError, match="does not exist"):
        runs.load(tmp_path)
