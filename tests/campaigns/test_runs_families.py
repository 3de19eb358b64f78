"""The rendered script of each family trains tiny weights on the real trainer, with its table's flags.

By kohya's own scripts they also train the same with the patches and without. Kills are in test_epoch_ends.py.
"""

import socket

import musubi_helpers
import pytest
import resume_helpers
import tiny_families
import tiny_musubi
import tiny_sd_scripts
from runs_helpers import run_script

import presets
import runs
from runs.command import flags
from runs.flags import known_flags

pytestmark = pytest.mark.timeout(900)
# A model of the tables → the family of tiny weights (tiny_families.py, tiny_musubi.py).
TINY = {model: name for name, row in tiny_families.table().items() for model in row["models"]}
MUSUBI = {model: name for name, row in tiny_musubi.FAMILIES.items() for model in row["models"]}
NOT_ON_A_CPU = ("fp8_base", "fp8_scaled", "fp8_text_encoder", "fp8_vl", "fp8_t5", "blocks_to_swap")


def paths(name: str, work) -> dict[str, str]:
    """The flags that name the tiny weights and shorten captions, as extra flags of a run."""
    given = {"pretrained_model_name_or_path": f"{work}/model.safetensors", "tokenizer_cache_dir": f"{work}/tokenizers"}
    given |= tiny_families.own_flags(name, work)
    return {flag: value for flag, value in given.items() if str(work) in value or flag.endswith("_max_token_length")}


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Renders a run of two steps, trains it, and returns its folder."""
    data = tmp_path / "data"
    data.mkdir()
    monkeypatch.setenv("HANGPROOF_DATA", str(data))

    def train(model: str, backend: str, work, environment: dict[str, str], extra: dict, **fields):
        spec = runs.make({
            "name": model, "trigger": "ohwx", "model": model, "backend": backend,
            "tier": presets.smallest_tier(model, backend),
            "resolution": 64, "mixed_precision": "no", "rank": 4, "max_train_steps": 2, "repeats": 1,
            "save_every_n_steps": 2, "save_every_n_epochs": 0, "workers": 0, "extra": extra, **fields,
        })  # fmt: skip
        folder = runs.create(spec, work / "images")
        done = run_script(folder / "train.sh", None, **environment | {"HANGPROOF_DATA": str(data), "TIMEOUT_S": "600"})
        log = (done.stdout + done.stderr).decode(errors="replace")
        assert done.returncode == 0, log[-4000:]
        assert (folder / f"{folder.name}.safetensors").is_file() and (folder / f"{folder.name}-state").is_dir()
        return folder

    return train


@pytest.mark.parametrize("model", list(TINY))
def test_the_rendered_script_of_a_family_trains(tmp_path, trained, model):
    tiny_sd_scripts.need()
    if reason := tiny_families.why_not(TINY[model]):
        pytest.skip(reason)
    work = tiny_families.workdir(TINY[model])
    extra = {**paths(TINY[model], work), "optimizer_type": "Adafactor"}
    extra["optimizer_args"] = ["relative_step=False", "scale_parameter=False", "warmup_init=False"]
    tier = presets.smallest_tier(model, "sd-scripts")
    plain = runs.make({"name": "x", "model": model, "backend": "sd-scripts", "tier": tier})
    if "max_token_length" in flags(plain, tmp_path):
        extra["max_token_length"] = False
    environment = tiny_families.environment(TINY[model], work)
    folder = trained(model, "sd-scripts", work, environment, extra, sample_every_n_steps=2, sample_steps=1)
    assert len(list((folder / "sample").glob("*.png"))) == 1


@pytest.mark.parametrize("model", list(MUSUBI))
def test_the_rendered_script_of_a_family_of_musubi_caches_and_trains(trained, model):
    if reason := tiny_musubi.why_not():
        pytest.skip(reason)
    work = tiny_musubi.workdir(MUSUBI[model])
    row, about = presets.trainer_of(model, "musubi"), presets.models()[model]
    extra = dict.fromkeys(row["needs"], "tiny") | {"dit": str(work / "dit.safetensors"), "optimizer_type": "AdamW"}
    known = known_flags("musubi", about["family"])
    extra = {flag: value for flag, value in {**extra, **dict.fromkeys(NOT_ON_A_CPU, False)}.items() if flag in known}
    fields = {"control_dir": str(work / "control") if about["control"] else ""}
    fields["mixed_precision"] = "no" if row["precisions"] else "bf16"
    folder = trained(model, "musubi", work, tiny_musubi.environment(work), extra, **fields)
    assert len(list((folder / "cache").glob("*.safetensors"))) == 14


@pytest.mark.parametrize("family", MUSUBI.values())
def test_a_family_of_musubi_tuner_trains_the_same_and_is_followed(family, tmp_path):
    """With caches that are made without the guards."""
    if reason := tiny_musubi.why_not():
        pytest.skip(reason)
    work = tiny_musubi.workdir(family)
    plain, guarded = tmp_path / "plain", tmp_path / "guarded"
    more = ["--max_train_epochs", "2", "--save_state", "--sample_every_n_epochs", "1"]
    more += ["--sample_prompts", str(work / "prompts.txt")]
    for out in (plain, guarded):
        tiny_musubi.cached(work, out, family=family)
        env = resume_helpers.followed(out)
        result = musubi_helpers.train(out, *more, family=family, patched=out == guarded, env=env)
        assert result.code == 0 and "skipped" not in result.log, result.log[-3000:]
    assert {"step", "sample", "save"} <= set(resume_helpers.same_training(plain, guarded, 14, 2))


@pytest.mark.parametrize("name", tiny_families.table())
def test_it_trains_the_same_its_loader_reads_the_lora_and_a_sample_over_its_budget_is_skipped(name, tmp_path):
    """One more step from the LoRA with a learning rate that is 0 in float32: the LoRA that is saved is the one that was
    read, to the digit. Sample images have no time, and a hub accepts connections and never answers.

    With --dim_from_weights the family's network module reads the file twice: for its shape, then for its weights.
    """
    if reason := tiny_families.why_not(name):
        pytest.skip(reason)
    guarded = resume_helpers.same_family(name, tmp_path)
    lora, made = guarded / "made/tiny.safetensors", tmp_path / "made"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        env |= {"HANGPROOF_SAMPLE_BUDGET_S": "0.001", "HANGPROOF_HUB_TIMEOUT_S": "60"}
        result = resume_helpers.train_family(
            name, tmp_path, "--dim_from_weights", "--sample_at_first", images=guarded / "images", env=env,
            network_weights=str(lora), learning_rate="1e-60", max_train_epochs=None, max_train_steps="1",
        )  # fmt: skip
    assert f"load network weights from {lora}: <All keys matched successfully>" in result.log, result.log[-3000:]
    assert resume_helpers.tensors(made / "tiny.safetensors") == resume_helpers.tensors(lora)
    skipped = "sample image 1 skipped: BudgetExceeded: the budget of 0.001 s was exceeded after"
    assert result.log.count(skipped) == 1 and not list(made.rglob("*.png")), result.log[-3000:]
