"""Configuring a run: templates, import, the edited script, export and estimates; the last test walks the whole way in a browser."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from draft_helpers import drop as drop_into
from draft_helpers import photo
from ui_helpers import PROJECT, Server, kill_runs
from ui_page import a_tab, field, open_page, state_is, until

import runs
from presets.estimate import whole
from runs.files import RunError
from ui import jobs, served
from ui.dataset import draft
from ui.new import estimates, export, export_job, form, importing, script_editor
from ui.run import launch_tab

DRAFT = "d" * 24
FORM = {"name": "cat", "trigger": "ohwx", "model": "tiny-flux", "backend": "diffusers", "tier": "16G", "resolution": 64}
FORM |= {"mixed_precision": "no", "max_train_steps": "12", "save_every_n_steps": "6", "sample_every_n_steps": "0"}
FORM |= {"workers": 0, "repeats": 1}


@pytest.fixture
def data(tmp_path, monkeypatch):
    root = tmp_path / "data"
    root.mkdir()
    monkeypatch.setenv("HANGPROOF_DATA", str(root))
    yield root
    kill_runs(root)


@pytest.fixture
def filled(data, tmp_path):
    """A draft with settings and two images."""
    draft.save_fields(DRAFT, FORM)
    drop_into(DRAFT, photo(tmp_path / "a.png", 1), photo(tmp_path / "b.png", 2))
    return DRAFT


def do(what, **more):
    return script_editor.script_tools({"draft": DRAFT, "do": what, **more})


def edit(text):
    return text.replace("set -eu\n", "set -eu\n# mine\n", 1)


# The edited script --------------------------------------------------------------------------------------------------------


def test_an_edit_is_stored_and_two_windows_overwrite_nothing(filled):
    first = do("start")
    saved = do("save", text=edit(first["script"]), version="")
    assert saved["ok"] and saved["version"] and not saved["changed"]
    theirs = do("save", text=first["script"] + "# theirs\n", version="")
    assert theirs["conflict"]["script"] == edit(first["script"]) and any("theirs" in line for line in theirs["changed"])
    assert script_editor.stored(filled)["script"] == edit(first["script"])
    assert do("save", text=edit(first["script"]) + "# both\n", version=saved["version"])["ok"]


def test_later_settings_do_not_change_it_and_start_asks_which_one(filled):
    text = edit(do("start")["script"])
    do("save", text=text, version="")
    draft.save_fields(DRAFT, {"max_train_steps": "20"})
    spec = form.spec_of(importing.current(DRAFT))
    with pytest.raises(RunError, match="settings changed after you edited"):
        script_editor.for_run(DRAFT, spec)
    shown = script_editor.value(DRAFT, runs.script(spec, runs.outputs_dir() / "cat"), True)
    assert "+  --max_train_steps 20 \\" in shown["changed"] and shown["script"] == text
    kept = do("keep")
    assert kept["script"] == text and script_editor.for_run(DRAFT, spec).max_train_steps == 12
    draft.save_fields(DRAFT, {"max_train_steps": "24"})
    merged = do("merge")
    assert "--max_train_steps 24" in merged["script"] and "# mine" in merged["script"] and not merged["left"]
    back = do("discard")
    assert "# mine" not in back["script"] and back["before"] == merged["script"] and script_editor.stored(DRAFT) is None


def test_the_name_of_the_run_follows_the_form(filled):
    do("save", text=edit(do("start")["script"]), version="")
    draft.save_fields(DRAFT, {"name": "dog"})
    spec = script_editor.for_run(DRAFT, form.spec_of(importing.current(DRAFT)))
    text = runs.script(spec, runs.outputs_dir() / "dog")
    assert "--output_name dog" in text and "# mine" in text and "/cat" not in text


def test_findings_come_with_a_line_and_a_fix(filled):
    text = do("start")["script"].replace("--output_name cat", "--output_name other")
    (found,) = do("save", text=text, version="")["findings"]
    assert found["level"] == "error" and "--output_name" in text.splitlines()[found["line"] - 1]
    assert "--output_name cat" in do("fix", text=text, fix=found["fix"])["script"]


def test_a_run_copied_into_the_form_brings_its_script(filled):
    do("save", text=edit(do("start")["script"]), version="")
    spec = script_editor.for_run(DRAFT, form.spec_of(importing.current(DRAFT)))
    other = "e" * 24
    script_editor.copy_from_run(other, spec)
    assert "# mine" in script_editor.stored(other)["script"]
    script_editor.copy_from_run(other, form.spec_of(importing.current(DRAFT)))
    assert script_editor.stored(other) is None


@pytest.mark.parametrize(
    "data_",
    [
        None,
        [],
        {},
        {"do": "start"},
        {"do": "start", "draft": "../x"},
        {"do": "nothing", "draft": DRAFT},
        {"do": ["x"], "draft": DRAFT},
    ]
    + [{"do": what, "draft": DRAFT, "text": 3} for what in ("save", "fix", "keep", "merge")]
    + [{"do": "save", "draft": DRAFT, "text": "x" * 300_000, "version": ""}],
)
def test_calls_get_an_answer_whatever_they_hold(filled, data_):
    answer = script_editor.script_tools(data_)
    assert answer["ok"] is False and answer["error"]


# Import -------------------------------------------------------------------------------------------------------------------


def test_an_import_names_each_change_of_the_form_and_its_image_folders(filled, tmp_path):
    photo(tmp_path / "there" / "10_cat" / "x.png", 3)
    text = f"image_dir = {json.dumps(str(tmp_path / 'there'))}\nnum_repeats = 4\n"
    command = "accelerate launch flux_train_network.py --network_dim 24 --noise_offset 0.1 --max_train_epochs 5"
    answer = importing.setup({
        "draft": DRAFT, "do": "read",
        "files": [{"name": "d.toml", "text": f"[[datasets]]\n[[datasets.subsets]]\n{text}"}, {"name": "", "text": command}],
    })  # fmt: skip
    assert answer["ok"], answer
    by_key = {one["key"]: one for one in answer["changes"]}
    assert (
        by_key["rank"]["after"] == "24"
        and by_key["model"]["after"] == "FLUX.1-dev"
        and by_key["repeats"]["after"] == "4"
    )
    assert by_key["max_train_steps"]["after"] == "" and "noise_offset=0.1" in by_key["flags"]["after"]
    assert "name" not in by_key and answer["values"]["epochs"] == 5
    assert answer["folders"] == [{"path": str(tmp_path / "there"), "images": 1, "problem": ""}]
    assert draft.form(DRAFT) == {key: FORM[key] for key in FORM}, "nothing is changed before it is used"
    spec = form.parse({**importing.current(DRAFT), **answer["values"], "flags": ""})[0]
    assert (spec.rank, spec.epochs, spec.model) == (24, 5, "flux-dev")


# Estimates ----------------------------------------------------------------------------------------------------------------


def test_cost_time_and_disk_are_beside_memory_and_the_command_shows_them(data, tmp_path):
    spec = runs.make(
        {"name": "cat", "model": "flux-dev", "tier": "20G", "trigger": "x", "price_per_hour": 0.5, "spend_limit": 0.1}
    )
    text = estimates.html(spec, {"": 20})
    seconds, source = estimates.time_of(spec, runs.planned_steps(spec, 20))
    assert f"about {0.5 * seconds / 3600:.2f}" in text and "spend limit of 0.1" in text and "RTX 4090" in source
    assert "samples" in text and "Cost" not in estimates.html(spec.changed(price_per_hour=0), {"": 20})
    found = whole(spec.model_dump(), {"": 18, "2_more": 1})
    assert found["steps"] == runs.planned_steps(spec, {"": 18, "2_more": 1})
    assert found["seconds"] == pytest.approx(whole(spec.model_dump(), {"": 18, "2_more": 1}, 1.0)["seconds"], rel=5)
    folder = runs.create(runs.make({**FORM, "price_per_hour": 2}), [photo(tmp_path / "a.png", 1)])
    done = subprocess.run(
        [sys.executable, "-m", "presets", "estimate", folder.name, "--json"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["steps"] == 12 and said["cost"] > 0 and "time: about" in done.stdout and "disk: about" in done.stdout


# Export -------------------------------------------------------------------------------------------------------------------


def exported(seconds=120):
    export.start(DRAFT)
    until(lambda: export.status(DRAFT)["state"] != "running", "the ZIP", seconds)
    found = export.status(DRAFT)
    assert found["state"] == "done", found
    return Path(found["file"])


def test_a_draft_is_exported_with_its_script_data_set_and_images(filled):
    do("save", text=edit(do("start")["script"]), version="")
    path = exported()
    with zipfile.ZipFile(path) as archive:
        names = {name.removeprefix("cat/") for name in archive.namelist()}
        assert {"train.sh", "train.bat", "README.txt", "outputs/cat/dataset.toml", "outputs/cat/run.toml"} <= names
        assert {"datasets/cat/a.png", "datasets/cat/b.png", "datasets/cat/a.txt"} <= names
        assert len(archive.read("cat/README.txt").decode().strip().splitlines()) == 3
        assert 'image_dir = "./datasets/cat"' in archive.read("cat/outputs/cat/dataset.toml").decode()
        assert "# mine" in archive.read("cat/outputs/cat/run.toml").decode()
        assert archive.read("cat/train.bat").count(b"\r\n") > 10
        assert archive.getinfo("cat/train.sh").external_attr >> 16 & 0o111
    assert served.find(str(path))[1] == "application/zip"
    assert served.find(str(path.parent / ".jobs" / "export.json")) is None
    assert not [one for one in path.parent.glob(".work*")], "no working folder is left"
    assert not (runs.outputs_dir() / "cat").exists()


def test_an_export_that_cannot_be_made_says_why(data):
    draft.save_fields(DRAFT, {**FORM, "rank": 0})
    export.start(DRAFT)
    until(lambda: export.status(DRAFT)["state"] != "running", "the end")
    assert export.status(DRAFT)["state"] == "failed" and "rank" in export.status(DRAFT)["error"].lower()
    draft.save_fields(DRAFT, {"rank": 4})
    with pytest.raises(RunError, match="at least one image"):
        export_job.write(DRAFT)


def test_a_run_is_exported_as_a_zip_that_the_page_sends(data, tmp_path):
    folder = runs.create(runs.make(FORM), [photo(tmp_path / "a.png", 1)])
    answer = launch_tab.write_files({"run": "cat", "kind": "bundle", "options": {"--zip": True}})
    assert answer == {"ok": True}
    until(lambda: jobs.read(folder, "launch-bundle").state == "done", "the ZIP")
    (file,) = launch_tab.job_output({"run": "cat", "job": "launch-bundle"})["files"]
    assert file["name"] == "cat.zip" and served.find(str(folder / "cat.zip"))[1] == "application/zip"
    with zipfile.ZipFile(folder / "cat.zip") as archive:
        assert archive.testzip() is None and {"cat/train.sh", "cat/train.bat"} <= set(archive.namelist())


@pytest.mark.long
def test_an_exported_zip_trains_in_another_folder_with_the_edited_script(filled, tmp_path):
    do(
        "save",
        text=do("start")["script"].replace("set -eu\n", 'set -eu\ntouch "$HANGPROOF_DATA/mine"\n', 1),
        version="",
    )
    path, there = exported(), tmp_path / "else where"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(path), str(there)], check=True)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", str(there / "cat" / "train.sh")],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (there / "cat" / "outputs" / "cat" / "cat.safetensors").is_file() and (there / "cat" / "mine").exists()


# In the browser -----------------------------------------------------------------------------------------------------------

HANGPROOF = """accelerate launch -m trainer --pretrained_model_name_or_path tiny-flux --network_dim 6 --network_alpha 3 \\
  --learning_rate 1e-3 --max_train_steps 30 --save_every_n_steps 10 --mixed_precision no --blocks_to_swap 4"""


@pytest.mark.long
def test_from_a_template_and_an_import_to_a_finished_run_of_the_edited_script(browser, data, tmp_path):
    """Two windows, a second browser, and a server that is killed while the script is edited."""
    photos = tmp_path / "photos"
    for number in range(3):
        photo(photos / f"{number}.png", number)
    server = Server(data)
    try:
        server.wait_for_output("Hangproof is running at")
        with a_tab(browser) as page:
            open_page(page, server)
            for name in ("More settings", "Sample images during training"):
                page.get_by_role("button", name=name).click()
            field(page, "trigger").fill("ohwx")
            page.locator("#setup summary").first.click()
            page.get_by_test_id("template-person").click()
            page.get_by_test_id("use-settings").click()
            until(lambda: field(page, "rank").input_value() == "16", "the template's rank")
            assert "portrait photo of ohwx" in field(page, "prompts").input_value()
            page.get_by_test_id("undo-settings").click()
            until(lambda: field(page, "rank").input_value() == "4", "the rank from before")
            page.get_by_label("Name of a new template").fill("Mine <img src=x>")
            page.get_by_role("button", name="Save these settings").click()
            page.locator(".hp-setup-list strong").get_by_text("Mine <img src=x>", exact=True).wait_for()

            files = page.get_by_test_id("import-files")
            (tmp_path / "train.sh").write_text(HANGPROOF)
            subset = f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = {json.dumps(str(photos))}\nnum_repeats = 1\n"
            (tmp_path / "dataset.toml").write_text(subset)
            files.set_input_files([str(tmp_path / "train.sh"), str(tmp_path / "dataset.toml")])
            page.get_by_test_id("import-read").click()
            page.locator(".hp-outcome-dropped").first.wait_for()
            assert field(page, "rank").input_value() == "4", "nothing changes before it is used"
            page.get_by_test_id("import-images").click()
            page.get_by_test_id("image-count").get_by_text("3 image", exact=False).wait_for()
            page.get_by_test_id("use-settings").click()
            until(lambda: field(page, "rank").input_value() == "6", "the imported rank")
            assert field(page, "max_train_steps").input_value() == "30"

            with a_tab(browser) as other:  # another browser: its own draft, the same templates
                open_page(other, server)
                other.locator("#setup summary").first.click()
                other.locator(".hp-setup-list strong").get_by_text("Mine <img src=x>", exact=True).wait_for()
                other.get_by_label("Name of a new template").fill("mine <IMG src=x>")
                other.get_by_role("button", name="Save these settings").click()
                other.get_by_text("exists already").wait_for()

            field(page, "name").fill("walk")
            page.get_by_test_id("edit-script").click()
            page.locator("#script .cm-content[contenteditable=true]").wait_for()
            insert_line(page, "if true; then")
            page.get_by_test_id("script-findings").get_by_text("bash:").wait_for()
            page.get_by_role("button", name="Start training").click()
            page.locator(".hp-problem").get_by_text("The script: Line", exact=False).wait_for()
            assert not list((data / "outputs").glob("*/run.toml")), "Start refuses it"
            remove_line(page)
            until(lambda: page.get_by_test_id("script-findings").get_by_text("bash:").count() == 0, "no finding")

            insert_line(page, MARK)
            server.stop(hard=True)  # before the page has sent it
            server = Server(data, port=server.port)
            server.wait_for_output("Hangproof is running at")
            until(lambda: MARK in script_of(data), "the line that was typed while the server was away")
            page.reload()
            page.locator("body.hp-open").wait_for()
            page.get_by_role("button", name=re.compile("^The script")).click()
            until(lambda: MARK in editor(page), "the edited script after a reload")

            second = page.context.new_page()
            open_page(second, server)
            second.get_by_role("button", name=re.compile("^The script")).click()
            until(lambda: MARK in editor(second), "the edited script in a second window")
            insert_line(second, "# second window")
            until(lambda: "# second window" in script_of(data), "the second window's line")
            page.bring_to_front()
            if "# second window" not in editor(page):
                insert_line(page, "# first window")
                page.get_by_role("button", name="Keep mine").click()
                until(lambda: "# first window" in script_of(data), "the script that was kept")
            second.close()

            page.get_by_role("button", name="Start training").click()
            state_is(page, "completed")
        folder = data / "outputs" / "walk"
        assert (folder / "train.sh").read_text() == script_of(data) and (data / "edited").exists()
        spec = runs.load(folder)
        assert (spec.rank, spec.alpha, spec.max_train_steps) == (6, 3.0, 30) and (folder / "walk.safetensors").is_file()
    finally:
        server.stop(hard=True)


MARK = 'touch "$HANGPROOF_DATA/edited"'


def insert_line(page, text):
    """Add a line below the first one."""
    page.locator("#script .cm-content").click()
    page.keyboard.press("Control+Home")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.keyboard.insert_text(text)


def remove_line(page):
    """Remove the line below the first one."""
    page.locator("#script .cm-content").click()
    page.keyboard.press("Control+Home")
    page.keyboard.press("End")
    page.keyboard.press("Shift+ArrowDown")
    page.keyboard.press("Shift+End")
    page.keyboard.press("Delete")


def editor(page) -> str:
    return page.locator("#script .cm-content").inner_text()


def script_of(data: Path) -> str:
    """The edited script that the only draft has."""
    (path,) = data.glob("datasets/.drafts/*/script.json")
    return json.loads(path.read_text())["script"]
