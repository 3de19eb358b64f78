"""A secret, however it is given, is in one private file and in nothing that is shown, exported, published or stored."""

from __future__ import annotations

import json
import subprocess
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from draft_helpers import create_run, drop, photo
from hypothesis import HealthCheck, given, settings, strategies as st
from runs_helpers import call, executable, pictures, run_script, spec
from safetensors.numpy import save_file
from store_helpers import held

import presets
import runs
from launch import publish
from launch.store.copies import Copier
from launch.store.places import open_place
from monitor.process.spawned import idle
from monitor.run_folder import RunFolder
from runs import env_file, manage, scripts, sweep
from ui import served
from ui.api import drafts as api
from ui.dataset import draft
from ui.new import form, script_editor, templates
from ui.run import compare, run_page, view

VALUE = "s3cr3t-0123456789abcdef0123456789abcdef01234567"
OTHER = "hf_OtherSecretOtherSecretOther"
STORE = "s3://bucket/runs"
FIELDS = {"name": "cat", "trigger": "ohwx", "model": "tiny-flux", "backend": "diffusers", "max_train_steps": 6}
FIELDS |= {"resolution": 64, "workers": 0, "rank": 4}


def exposed_in(root: Path, *values: str) -> list[str]:
    """The files below a folder whose name or content has one of the values; archives are read, too."""
    found = []
    for path in sorted(root.rglob("*")):
        if not path.is_file():
            continue
        contents = [path.read_bytes()]
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
        if any(value.encode() in content for value in values for content in contents):
            found.append(str(path.relative_to(root)))
    return found


def outside(data: Path) -> list[str]:
    """The files of the data folder that expose a secret, other than the private ones."""
    return [path for path in exposed_in(data, VALUE, OTHER) if not path.startswith(".secrets/")]


def set_up(client_data: Path, **fields: object) -> str:
    """A draft with images and settings, as the API makes it."""
    draft_id = api.new_draft()
    drop(draft_id, photo(client_data / "in" / "a.png"), photo(client_data / "in" / "b.png", 1))
    api.set_settings(draft_id, {**FIELDS, **fields})
    return draft_id


def start(draft_id: str) -> Path:
    """The run that Start would make of a draft."""
    return create_run(draft_id, {})[0]


def plain_run(root: Path, store: str = "", **fields: object) -> Path:
    return runs.create(spec(**FIELDS, store=store, **fields), pictures(root / "photos"))


def by_python(root: Path) -> Path:
    return plain_run(root, STORE, environment={"WANDB_API_KEY": VALUE, "PLAIN": "shown"})


def by_command(root: Path) -> Path:
    words = ["--images", pictures(root / "photos"), "--model", "tiny-flux", "--trigger", "ohwx"]
    words += ["--set", "resolution=64", "--set", f"store={STORE}", "--set", f"wandb_api_key={VALUE}"]
    done = call("runs", "new", "--name", "cat", *words)
    assert done.returncode == 0, done.stderr
    assert "WANDB_API_KEY: kept in a file that only you can read" in done.stderr
    assert VALUE not in done.stdout + done.stderr
    return Path(done.stdout.strip())


def by_options(root: Path) -> Path:
    draft_id = set_up(root, flags=f"wandb_api_key={VALUE}\nstore={STORE}\n")
    answer = json.dumps(api.review_draft(draft_id))
    assert VALUE not in answer and "WANDB_API_KEY: kept in a file" in answer
    return start(draft_id)


def by_import(root: Path) -> Path:
    script = root / "train.sh"
    script.write_text(
        f"export WANDB_API_KEY='{VALUE}'\naccelerate launch sd-scripts/flux_train_network.py --network_dim 4 --huggingface_token "
        f"{OTHER} --pretrained_model_name_or_path flux1-dev.sft --network_module networks.lora_flux\n"
    )
    draft_id = set_up(root)
    found = templates.read_files([("train.sh", script.read_text())])
    script.unlink()
    form.save(draft_id, templates.form_values(found, form.current(draft_id)))
    answer = json.dumps(api.review_draft(draft_id))
    assert VALUE not in answer and OTHER not in answer and "kept in a file" in answer
    api.set_settings(draft_id, {**FIELDS, "mixed_precision": "no"})
    flags = form.current(draft_id)["flags"]
    kept = "".join(f"{line}\n" for line in flags.splitlines() if line.startswith("secrets="))
    assert set(env_file.named_in(kept)) == {"WANDB_API_KEY", "HF_TOKEN"}
    api.set_settings(draft_id, {"flags": f"{kept}store={STORE}\n"})
    folder = start(draft_id)
    assert env_file.read(folder)["HF_TOKEN"] == OTHER
    return folder


def by_script(root: Path) -> Path:
    draft_id = set_up(root, flags=f"store={STORE}")
    added = f"set -eu\nexport WANDB_API_KEY={VALUE} # mine\n"
    script_editor.save(draft_id, script_editor._generated(draft_id).replace("set -eu\n", added, 1))
    stored = script_editor.stored(draft_id)["script"]
    assert VALUE not in stored and "# mine" in stored
    return start(draft_id)


WAYS = [by_python, by_command, by_options, by_import, by_script]


@pytest.fixture
def made(request, data, monkeypatch):
    """A run that got the secret in one of the ways."""
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    folder = request.param(data)
    assert env_file.read(folder)["WANDB_API_KEY"] == VALUE, "it is kept"
    return folder


each_way = pytest.mark.parametrize("made", WAYS, indirect=True, ids=lambda way: way.__name__)
# A run keeps its secrets in one of two forms: in its settings, or in a script of its own.
each_form = pytest.mark.parametrize("made", [by_command, by_script], indirect=True, ids=lambda way: way.__name__)


@each_way
def test_a_secret_is_in_no_file_but_the_private_one(made, data):
    kept = [str(path.relative_to(data)) for path in (data / ".secrets").iterdir()]
    own = str(env_file.path_of(made).relative_to(data))
    assert sorted(exposed_in(data, VALUE, OTHER)) == sorted(kept) and own in kept
    assert {path.stat().st_mode & 0o777 for path in (data / ".secrets").iterdir()} == {0o600}
    assert (data / ".secrets").stat().st_mode & 0o777 == 0o700
    assert "WANDB_API_KEY" in (made / "run.toml").read_text() and "WANDB_API_KEY" in (made / "train.sh").read_text()


def test_a_run_has_its_secrets_whichever_path_leads_to_the_data_folder(data, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(data)
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "link"))
    folder = by_command(data)
    for seen in (folder, data / "outputs" / folder.name):  # the monitor follows links
        assert env_file.read(seen)["WANDB_API_KEY"] == VALUE
        assert env_file.masking(seen)(VALUE.encode()) == b"(WANDB_API_KEY)"


@each_form
def test_a_secret_leaves_with_nothing_that_is_shared(made, data, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    loaded = runs.load(made)
    save_file({"transformer.a.lora_A.weight": np.ones((4, 8), np.float32)}, made / "cat.safetensors", {"ss_steps": "4"})
    with open(out / "all.zip", "wb") as file:
        file.writelines(served.archive(made))
    assert call("launch", "bundle", "cat", "-o", out / "bundle.zip").returncode == 0
    with zipfile.ZipFile(out / "bundle.zip") as archive:
        assert "WANDB_API_KEY" in archive.read("cat/README.txt").decode()
    rented = ["--image", "me/h:1", "--gpu", "L4"]
    for place, words in (("skypilot", rented), ("runpod", rented), ("vast", rented), ("slurm", [])):
        done = call("launch", place, "cat", *words, "--json")
        assert done.returncode == 0, done.stderr
        (out / f"{place}.txt").write_text(done.stdout + done.stderr)
        if place != "slurm":
            assert "WANDB_API_KEY" in json.loads(done.stdout.splitlines()[-1])["secrets"]
    place = open_place(str(out / "store")).under("cat")
    Copier(place, made, held(place)).push()
    assert any(path.is_file() for path in (out / "store").rglob("*"))
    form_of_card = {"lora": "", "title": "", "description": "", "licence": "mit", "base_model": None, "samples": 0}
    for name, content in publish.prepare(made, form_of_card).items():
        (out / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    shown = view.read(made)
    texts = [
        runs.dumps(loaded), repr(loaded), json.dumps(loaded.public()), json.dumps(compare.settings(shown)),
        call("runs", "show", "cat", "--json").stdout, json.dumps(shown.spec, default=str),
    ]  # fmt: skip
    (out / "shown.txt").write_text("\n".join(texts))
    assert exposed_in(out, VALUE, OTHER) == outside(data) == []


@each_way
def test_a_script_that_is_run_by_hand_reads_its_secrets_and_says_which_are_missing(made, tmp_path):
    program = executable(tmp_path / "python", '#!/bin/sh\nprintf "%s\\n" "$WANDB_API_KEY" "$@"\n')
    done = run_script(made / "train.sh", program)
    assert done.returncode == 0 and done.stdout.decode().startswith(VALUE), done.stderr
    assert done.stdout.decode().count(VALUE) == 1 and b"no value" not in done.stderr, "and it is in no argument"
    env_file.path_of(made).unlink()
    done = run_script(made / "train.sh", program)
    assert done.returncode == 0 and b"train.sh: WANDB_API_KEY has no value" in done.stderr
    done = run_script(made / "train.sh", program, WANDB_API_KEY="from outside", HF_TOKEN="x")
    assert done.stdout.decode().startswith("from outside") and b"no value" not in done.stderr


@each_form
def test_copies_of_a_run_have_its_secrets_and_its_file_goes_where_it_goes(made, data):
    base = runs.load(made)
    if base.edited is None:
        some = sweep.combinations(base, {"rank": [8, 16]})
        done = sweep.create("cat", some, {"rank": [8, 16]}, data / "datasets" / "cat")
        for run, _ in done.runs:
            assert env_file.read(data / "outputs" / run)["WANDB_API_KEY"] == VALUE
            manage.delete(run, idle, images=True)
            assert not env_file.path_of(data / "outputs" / run).exists()
    draft_id = draft.new_id()
    list(run_page.copy_to_new_lora("cat", "", draft_id))
    again = start(draft_id)
    assert again != made and env_file.read(again)["WANDB_API_KEY"] == VALUE
    manage.delete("cat", idle)
    assert not env_file.path_of(made).exists() and outside(data) == []


def test_a_new_run_does_not_get_the_secrets_of_an_earlier_one_of_its_name(data):
    env_file.write(data / "outputs" / "cat", {"WANDB_API_KEY": VALUE})
    assert not env_file.path_of(plain_run(data)).exists()


def test_a_template_and_an_export_of_a_draft_name_secrets_only(data):
    draft_id = set_up(data, flags=f"wandb_api_key={VALUE}\nrank=8\n")
    templates.save_template("mine", {**form.current(draft_id), "flags": f"WANDB_API_KEY={VALUE}\nrank=8"})
    (one,) = templates.listing()
    values = templates.values_of(one["key"])
    assert values["flags"] == 'rank=8\nsecrets=["WANDB_API_KEY"]\n'
    assert call("ui.new.export", draft_id).returncode == 0
    assert outside(data) == []
    assert list((data / "datasets" / ".drafts").rglob("*.zip"))


def test_a_secret_that_is_typed_letter_by_letter_is_whole_at_the_end(data):
    draft_id = set_up(data)
    for end in range(1, len(VALUE) + 1):
        draft.save_fields(draft_id, {"flags": f"rank=8\nwandb_api_key={VALUE[:end]}"})
    assert form.current(draft_id)["flags"] == 'rank=8\nsecrets=["WANDB_API_KEY"]\n'
    draft.save_fields(draft_id, {"flags": 'seed=3\nsecrets=["WANDB_API_KEY"]\n'})
    assert env_file.read(start(draft_id))["WANDB_API_KEY"] == VALUE
    draft.save_fields(draft_id, {"flags": "seed=3\n"})
    assert env_file.read(draft.folder(draft_id)) == {}, "it is no longer named"


def test_secrets_that_a_person_writes_into_run_toml_are_moved_when_it_is_read(data, tmp_path):
    folder = plain_run(data)
    text = (folder / "run.toml").read_text()
    text = text.replace("[environment]\n", f'[environment]\nWANDB_API_KEY = "{VALUE}"\n')
    text = text.replace("[extra]\n", f'[extra]\nhuggingface_token = "{OTHER}"\n')
    (folder / "run.toml").write_text(text)
    assert view.read(folder).spec["secrets"] == ["HF_TOKEN", "WANDB_API_KEY"]
    assert outside(data) == []
    assert env_file.read(folder) == {"HF_TOKEN": OTHER, "WANDB_API_KEY": VALUE}
    program = executable(tmp_path / "python", '#!/bin/sh\necho "$WANDB_API_KEY $HF_TOKEN" "$@"\n')
    said = run_script(runs.render(folder), program).stdout.decode()
    assert said.startswith(f"{VALUE} {OTHER} ") and "--huggingface_token" not in said


@pytest.mark.parametrize("written", [
    "export WANDB_API_KEY={}", "export WANDB_API_KEY='{}'", "MY_KEY=$'{}'", 'WANDB_API_KEY="{}"',
    "declare -x MY_SECRET={}", "WANDB_API_KEY={} python x.py", "env HF_TOKEN={} python x.py",
    "# export WANDB_API_KEY={}", "wandb login {}", "wandb login --relogin {}", "python x.py --wandb_api_key {}",
    "python x.py --wandb_api_key={} --seed 1", "python x.py --wandb_api_key \\\n  '{}' \\\n  --seed 1",
    "hf auth login --token {}", "python x.py --my_password {}",
    "KEY={}\npython flux_train_network.py --wandb_api_key $KEY", "x={}\nexport WANDB_API_KEY={}\necho $x",
    "AWS_SECRET_ACCESS_KEY={} AWS_ACCESS_KEY_ID={} run", "export A=1 API_TOKEN={}", "export PGPASSWORD={}",
    "@echo off\r\nset WANDB_API_KEY={}\r\n", '@echo off\r\nset "WANDB_API_KEY={}"\r\n',
    "@echo off\r\nx.exe --wandb_api_key {} ^\r\n --seed 1",
])  # fmt: skip
def test_a_secret_is_found_however_a_script_writes_it(written):
    text, found = env_file.of_script(written.replace("{}", VALUE))
    assert VALUE not in text and VALUE in found.values(), text
    assert env_file.of_script(text) == (text, {}), "and once only"
    assert ("--seed 1" in text) == ("--seed 1" in written)


@pytest.mark.parametrize("written", [
    r"export WANDB_API_KEY=$'abc\x41defghijkl\041'", """export WANDB_API_KEY=''abcA"defghijkl"'!'""",
    """x.py --wandb_api_key abc"Adefgh"ijkl! """,
])  # fmt: skip
def test_a_secret_with_escapes_or_quotes_inside_is_what_the_shell_makes_of_it(written):
    text, found = env_file.of_script(written)
    assert found == {"WANDB_API_KEY": "abcAdefghijkl!"} and "ijkl" not in text


def test_a_script_of_dashes_is_read_in_a_moment():
    began_s = time.process_time()
    assert env_file.of_script("--a" * 5000) == ("--a" * 5000, {})
    assert time.process_time() - began_s < 1


@pytest.mark.parametrize("written", [
    "export TOKENIZERS_PARALLELISM=false", "--keep_tokens 1 --max_token_length 225 --t5xxl_max_token_length 512",
    'export WANDB_API_KEY="${WANDB_API_KEY:-}"', "export HF_TOKEN=$(cat ~/token)", "--wandb_api_key $WANDB_API_KEY",
    "@echo off\r\nset X=%WANDB_API_KEY%\r\n", "cd /work\npython=${TRAINER_PYTHON:-}",
])  # fmt: skip
def test_what_is_no_secret_stays_in_a_script(written):
    assert env_file.of_script(written) == (written, {})


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=st.text(st.characters(min_codepoint=32, max_codepoint=0x24F, exclude_characters="\x7f"), min_size=1))
def test_each_value_reaches_the_script_as_it_was_given(data, value):
    env_file.write(data / "outputs" / "cat", {"MY_KEY": value})
    assert env_file.read(data / "outputs" / "cat") == {"MY_KEY": value}
    command = ["bash", "-euc", '. "$1"; printf %s "$MY_KEY"', "x", env_file.path_of(data / "outputs" / "cat")]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.stdout.decode() == value, done.stderr


def test_a_value_that_no_key_has_is_refused(data):
    with pytest.raises(runs.RunError, match="MY_KEY: the value has a line break"):
        env_file.write(data / "outputs" / "cat", {"MY_KEY": "a\nb"})
    (data / ".secrets").symlink_to(data)
    with pytest.raises(runs.RunError, match="is a link"):
        env_file.write(data / "outputs" / "cat", {"MY_KEY": "ab"})


def test_a_report_names_a_secret_that_the_trainer_printed(data):
    folder = by_python(data)
    (folder / "training.log").write_text(f"login with {VALUE}\nfailed: 401\n")
    assert RunFolder(folder).log_tail(0, 1000) == "login with (WANDB_API_KEY)\nfailed: 401\n"


def test_the_private_files_stay_out_of_version_control_and_of_the_image():
    """The data folder is the project's by default; SkyPilot leaves out what .gitignore names."""
    for name, line in ((".gitignore", f"/{env_file.FOLDER}/"), (".dockerignore", env_file.FOLDER)):
        assert line in (presets.tables.ROOT / name).read_text().splitlines()


def test_option_lines_keep_the_names_of_their_secrets_and_leave_the_values():
    lines = f'rank=8\n--wandb-api-key={VALUE}\nHF_TOKEN={OTHER}\nsecrets=["A_KEY"]\nwandb_api_key\n'
    text, values = env_file.of_lines(lines)
    assert values == {"WANDB_API_KEY": VALUE, "HF_TOKEN": OTHER}
    assert text == 'rank=8\nwandb_api_key\nsecrets=["A_KEY", "HF_TOKEN", "WANDB_API_KEY"]\n'
    assert env_file.of_lines("rank=8\nHF_TOKEN=") == ("rank=8\nHF_TOKEN=", {})
    assert env_file.named_in("rank=8\nsecrets = A_KEY, B_KEY\n") == ["A_KEY", "B_KEY"]


def test_the_secrets_among_the_fields_of_a_run_are_variables_and_named():
    for fields, wanted in (
        ({"rank": 8}, {"rank": 8}),
        ({"extra": {"wandb_api_key": " k "}}, {"environment": {"WANDB_API_KEY": "k"}, "extra": {}, "secrets": ["WANDB_API_KEY"]}),
        ({"extra": {"MY_KEY": 5, "seed": 1}}, {"environment": {"MY_KEY": "5"}, "extra": {"seed": 1}, "secrets": ["MY_KEY"]}),
        ({"extra": {"MY_KEY": ""}, "secrets": ["B"]}, {"extra": {}, "secrets": ["B"]}),
        ({"extra": {"huggingface_token": True}}, {"extra": {"huggingface_token": True}}),
        ({"environment": {"URL": "s3://me:pw@host", "A": "1"}}, {"environment": {"URL": "s3://me:pw@host", "A": "1"}, "secrets": ["URL"]}),
        ({"edited": {"script": "A_KEY=one", "generated": "x"}, "environment": {"A_KEY": "two"}},
         {"environment": {"A_KEY": "two"}, "edited": {"script": 'A_KEY="${A_KEY:-}"', "generated": "x"}, "secrets": ["A_KEY"]}),
        ({"secrets": "B, C"}, {"secrets": ["B", "C"]}),
        ({"secrets": 3, "environment": {"A_KEY": "x"}}, {"secrets": 3, "environment": {"A_KEY": "x"}}),
    ):  # fmt: skip
        assert env_file.moved(fields) == wanted


def test_a_run_toml_that_only_names_its_secrets_does_not_expose_them_and_a_flag_is_one_by_its_name():
    assert env_file.exposed({"environment": {"A_KEY": "x"}, "secrets": ["A_KEY"]})
    assert not env_file.exposed({"environment": {"A": "1"}, "secrets": ["A_KEY"]})
    assert all(map(env_file.is_secret_flag, ("wandb_api_key", "my_password", "token")))
    assert not any(map(env_file.is_secret_flag, ("keep_tokens", "max_token_length", "seed")))
    key = "0123456789abcdef0123"
    shown = (f"https://a.b/c?x=1&token={key}", f"https://a.b/c?X-Amz-Signature={key}", f"https://github_pat_{key}@a.b")
    assert all(env_file.is_secret("MIRROR", text) for text in shown)
    assert not env_file.is_secret("MIRROR", f"https://a.b/{key}?tokens=20&keys=1")


def test_the_private_file_is_read_and_shown_as_a_person_may_have_written_it(data):
    folder = data / "outputs" / "cat"
    env_file.write(folder, {"MY_KEY": "a b c d e", "SHORT": "abc"})
    path = env_file.path_of(folder)
    assert path == data / ".secrets" / "cat.env" != env_file.path_of(data / "cat"), "of a folder that is elsewhere"
    assert env_file.masking(folder)(b"x a b c d e abc") == b"x (MY_KEY) abc"
    lines = b"# note\nPLAIN=a 'b'\nexport EMPTY=\nexport 1X=2\nno line\nexport OPEN='x\n# \xff\nexport A='x y' # z\n"
    path.write_bytes(lines)
    assert env_file.read(folder) == {"PLAIN": "a 'b'", "EMPTY": "", "A": "x y"}
    env_file.write(folder, {})
    assert not path.exists()


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_the_lines_that_read_the_private_file_stand_once_after_the_comments_at_the_head(data, platform):
    comment, newline = ("@echo off", "\r\n") if platform == "win32" else ("#!/bin/bash", "\n")
    lines = scripts.script_lines(["MY_KEY"], data / "outputs" / "100%", platform)
    assert lines.count("MY_KEY") >= 2 and ("100%%.env" in lines) == (platform == "win32")
    script = f"{comment}{newline}{newline}# about{newline}cd /x{newline}"
    found = scripts.with_lines(script, lines)
    assert found == script.replace("cd /x", lines.replace("\n", newline) + "cd /x")
    assert scripts.with_lines(found, lines) == found and scripts.with_lines(script, "") == script
    assert scripts.with_lines(comment + newline, lines).startswith(comment + newline + lines[:3]), "only comments"
    assert scripts.script_lines([], data, platform) == ""
