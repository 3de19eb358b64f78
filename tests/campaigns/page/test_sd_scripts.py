"""Each tier, set up in the browser for kohya's sd-scripts, trains on its real code with the script that the page wrote."""

import re
from pathlib import Path

import psutil
import pytest
import tiny_sd_scripts
from runs_helpers import arguments_of, run_script, stub
from ui_helpers import kill_runs, photos, serving
from ui_page import a_tab, caption, drop, field, open_page, state_is, step_of, until

TIERS = {"12G": "12 GB", "16G": "16 GB", "20G": "20 GB and more"}
STEPS = 4
MARKS = {  # text that only this tier's script has
    "12G": ("--split_mode", "train_blocks=single", "adafactor"),
    "16G": ("adafactor", "constant_with_warmup"),
    "20G": ("adamw8bit",),
}


@pytest.fixture
def weights(tmp_path) -> tuple[Path, dict[str, str], str]:
    """A data folder with toy weights for the model "Toy Flux"; the server's environment; the options to type."""
    tiny_sd_scripts.need()
    work = tiny_sd_scripts.workdir()
    data = tmp_path / "data"
    options = tiny_sd_scripts.toy_model(data, work)
    toy = tiny_sd_scripts.environment(work)
    environment = {
        name: toy[name] for name in ("PYTHONPATH", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "SD_SCRIPTS_DIR")
    }
    environment["SD_SCRIPTS_VENV"] = str(tiny_sd_scripts.python().parent.parent)
    yield data, environment, "\n".join(f"{name}={value}" for name, value in options.items())
    kill_runs(data)


def launched(folder: Path) -> list[bytes]:
    """The arguments of the run's training process, which the script starts directly; [] while it is not running."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if process.environ().get("HANGPROOF_RUN") == str(folder) and words[1:3] == ["-m", "sd_scripts_patches"]:
                return [word.encode("utf-8", "surrogateescape") for word in words[1:]]
        except psutil.Error:
            continue
    return []


def starts_and_completes(page, server, tier: str, tmp_path: Path) -> None:
    name = f"kohya {tier}"
    folder = server.data / "outputs" / f"kohya-{tier}"
    field(page, "name").fill(name)
    page.get_by_label(TIERS[tier], exact=True).check()
    page.locator("#plan").get_by_text(f"{STEPS} steps", exact=True).wait_for()
    page.locator("#start").click()
    page.get_by_test_id("run-name").get_by_text(name).or_(
        page.locator("#problem .hp-bad, #run-notice .hp-bad")
    ).first.wait_for()
    assert page.locator(".hp-bad:visible").all_inner_texts() == []
    script = (folder / "train.sh").read_bytes()
    until(lambda: launched(folder), "the training runs")
    running = launched(folder)
    state_is(page, "completed")
    assert step_of(page) == STEPS
    assert (folder / "train.sh").read_bytes() == script  # the script is unchanged …
    assert running == arguments_of(
        run_script(folder / "train.sh", stub(tmp_path))
    )  # … and the training got its arguments
    assert not list(folder.glob("train.attempt-*")) and not (folder / "incidents").exists()
    text = script.decode()
    assert all(mark in text for mark in MARKS[tier]) and ("--split_mode" in text) == (tier == "12G")
    assert "blocks_to_swap" not in text and "Block swap enabled" not in (folder / "training.log").read_text()
    with page.expect_download() as download:
        page.get_by_test_id("download").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    assert path.name == f"kohya-{tier}.safetensors" and path.read_bytes() == (folder / path.name).read_bytes()
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as lora:
        keys = list(lora.keys())
        assert any("single_blocks" in key for key in keys)
        assert any("double_blocks" in key for key in keys) == (tier != "12G")
        assert float(abs(lora.get_tensor(next(k for k in keys if k.endswith("lora_up.weight")))).sum()) > 0


@pytest.mark.timeout(1500)
def test_each_tier_set_up_in_the_browser_trains_on_the_real_sd_scripts(browser, weights, tmp_path):
    data, environment, flags = weights
    with serving(data, **environment) as server, a_tab(browser) as page:
        open_page(page, server)
        field(page, "trigger").fill("tok")
        field(page, "model").click()
        page.get_by_role("option", name=re.compile("Toy Flux")).click()
        page.get_by_label("kohya's sd-scripts").check()
        page.get_by_text("More settings").click()
        field(page, "flags").fill(flags)
        for key, value in {"repeats": "1", "epochs": "1", "save_every_n_steps": "2"}.items():
            field(page, key).fill(value)
        drop(page, *photos("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg"), count=4)
        caption(page, "chelsea.png").fill("tok, a tabby cat")
        for tier in TIERS:
            starts_and_completes(page, server, tier, tmp_path)
            page.get_by_role("tab", name="New LoRA").click()
    assert (data / "datasets" / "kohya-20G" / "chelsea.txt").read_text() == "tok, a tabby cat\n"
