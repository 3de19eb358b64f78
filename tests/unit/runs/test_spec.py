"""Every validation error of a spec is a sentence of our own that names the field; none is pydantic's."""

import re

import pytest
from hypothesis import example, given, settings, strategies as st
from runs_helpers import spec
from seeds import ANY_VALUE

import runs
from runs.job import resolve
from runs.spec import NUL, NUMBER, UNKNOWN, VALUE, WHOLE, RunSpec

PYDANTIC = re.compile(
    r"Input should|unable to parse|[Vv]alue error|[Ff]ield required|Extra inputs"
    r"|valid (string|integer|number|list|dict)|input_value|input_type|pydantic|errors\.pydantic"
)


TAKEN = "cannot be set; use letters, digits and _, and no variable of Hangproof"
EMPTY = "captions once; leave this empty"
OWN = "You can add your own to models.toml"
DASH = "A value in a list cannot start with a dash; change"


def test_a_value_is_refused_in_one_line_and_each_wrong_field_has_its_own():
    for fields, line in (
        ({"trackers": "x"}, "trackers: Must be one of tensorboard, wandb, trackio, all, or empty"),
        ({"prompts": ["a", 2]}, "prompts: Prompt 2: Must be text"),
        ({"environment": {"A B": "1"}}, f"environment: 'A B' {TAKEN}"),
        ({"extra": {"sdpa": None}}, f"extra: sdpa: {VALUE}"),
        ({"extra": {"network_dim": 3}}, "extra: network_dim: Set the field rank instead"),
        ({"extra": {"output_dir": "x"}}, "extra: output_dir: The run's folder determines this flag; remove it"),
        ({"rankk": 1, "rank": 3.5}, f"rank: {WHOLE}\nrankk: Unknown field; did you mean rank?"),
        ({"tier": "9g+"}, "tier: Must be one of 8G, 12G, 16G, 20G"),
        ({"validation_split": 0.75}, "validation_split: Must be 0.5 or less"),
        ({"store": "s3://me:sesame@bucket/x"}, "store: An address with a password or key would be saved; "
         "set variables, or log in there"),
        ({"environment": {"PYTHONPATH": "1"}}, f"environment: 'PYTHONPATH' {TAKEN}"),
        ({"caption_dropout": 0.1, "backend": "sd-scripts"}, f"caption_dropout: kohya's trainers encode {EMPTY}"),
        ({"name": "!!!"}, "name: Use at least one letter or digit"),
        ({"name": "con"}, "name: Windows reserves the name con; choose another name"),
        ({"model": "flux-dev2pro"}, "backend: diffusers cannot train flux-dev2pro; use sd-scripts"),
        ({"model": "flux-devv"},
         f"model: no base model 'flux-devv'; did you mean flux-dev, flux2-dev, flux-dev2pro? {OWN}"),
        ({"rank": 0, "alpha": "a", "tier": "1G"},
         f"tier: Must be one of 8G, 12G, 16G, 20G\nrank: Must be 1 or more\nalpha: {NUMBER}"),
        ({"extra": {"network_args": ["-x"]}}, f"extra: network_args: {DASH} ['-x']"),
        ({"trigger": "a\0b"}, f"trigger: {NUL}"),
        ({"control_dir": "\udcff"}, f"control_dir: {NUL}"),
        ({"prompts": ["a", "a\0b"]}, f"prompts: Prompt 2: {NUL}"),
        ({"extra": {"--bad": 1}},
         "extra: '--bad' is not the name of a flag; write it without --, such as guidance_scale"),
    ):  # fmt: skip
        with pytest.raises(runs.RunError) as shown:
            runs.make({"name": "x", "backend": "diffusers", **fields})
        assert str(shown.value) == line


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


def test_a_flag_of_an_earlier_version_stays_one_where_the_trainer_refuses_the_field_that_it_became(tmp_path):
    """SD 1.5 trains its text encoder, so that sd-scripts can drop captions: such a run could not be shown or resumed."""
    made = spec(model="sd15", backend="sd-scripts", extra={"caption_dropout_rate": 0.1})
    assert resolve(made, tmp_path).flags["caption_dropout_rate"] == 0.1


def test_an_invalid_run_toml_is_refused_with_its_line_or_field(tmp_path):
    path = tmp_path / "run.toml"
    for content, message in (
        (b"name = \nx = 1", "at line 1"),
        (b"x = " + b"[" * 50_000, "not valid TOML"),
        (b'name = "caf\xe9"', "not UTF-8"),
        (b'name = "x"\nrankk = 3', "rankk: Unknown field; did you mean rank"),
        (b"rank = 3", "name: Missing; add a value"),
    ):
        path.write_bytes(content)
        with pytest.raises(runs.RunError, match=message.replace("(", r"\(")) as caught:
            runs.load(tmp_path)
        assert str(path) in str(caught.value)


def test_a_spec_is_written_without_secrets_and_open_fields_and_a_script_as_lines(tmp_path, data):
    edited = {"script": "set -eu\necho 'x'\n", "generated": "a\x07\n" + "'" * 3}
    environment = {"B": "2", "A": "1", "MY_KEY": "s3cret"}
    made = spec(tier=" 16g+", prompts=["a", " "], environment=environment, edited=edited, secrets=["MY_KEY"])
    assert (made.tier, made.prompts, made.public()["environment"]) == ("16G", ["a"], {"B": "2", "A": "1"})
    folder = data / "outputs" / made.slug
    folder.mkdir(parents=True)
    runs.save(folder, made)
    text = (folder / "run.toml").read_text()
    assert "s3cret" not in text and 'A = "1"\nB = "2"\n' in text and "max_train_steps" not in text
    assert "'" * 3 + "set -eu\necho 'x'\n" + "'" * 3 in text and "secrets" not in runs.dumps(spec())
    assert runs.load(folder) == made
    being_made = data / "outputs" / ".new-1"
    being_made.mkdir()
    (being_made / "run.toml").write_text(text.replace('A = "1"', 'A_KEY = "1"'))
    assert runs.load(being_made).secrets == ["A_KEY", "MY_KEY"]
    assert 'A_KEY = "1"' in (being_made / "run.toml").read_text(), "what is being made is not written"
