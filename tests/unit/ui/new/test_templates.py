"""Templates: settings under a name. No name is a path, no window overwrites another one's, a deletion can be undone."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runs.files import RunError
from ui.new import form, templates

ROOT = Path(__file__).resolve().parents[4]
VALUES = {**form.defaults(), "rank": 24, "prompts": "a cat\na dog", "name": "secret name", "trigger": "ohwx"}


@pytest.fixture(autouse=True)
def _data(tmp_path, monkeypatch):
    monkeypatch.setenv("HANGPROOF_DATA", str(tmp_path / "data"))


def own():
    return [one for one in templates.listing() if one["own"]]


def test_a_template_keeps_all_settings_but_name_trigger_and_images():
    saved = templates.save("My portraits", VALUES)
    (one,) = own()
    assert (one["key"], one["name"], one["version"]) == (saved["key"], "My portraits", saved["version"])
    values = templates.values_of(saved["key"], form.defaults())
    assert values["rank"] == 24 and values["prompts"] == "a cat\na dog"
    assert not {"name", "trigger", "control_dir"} & values.keys() and values.keys() <= set(form.KEYS)


def test_a_name_that_is_taken_is_replaced_only_on_purpose_and_only_as_it_was_seen():
    first = templates.save("A", VALUES)
    with pytest.raises(RunError, match="exists already"):
        templates.save("  a ", {**VALUES, "rank": 1})
    second = templates.save("A", {**VALUES, "rank": 2}, replace=first["version"])
    with pytest.raises(RunError, match="another window"):
        templates.save("A", {**VALUES, "rank": 3}, replace=first["version"])
    assert templates.values_of(second["key"], {})["rank"] == 2


def test_of_many_windows_that_save_one_name_exactly_one_does():
    outcomes = []

    def save(rank):
        try:
            outcomes.append(templates.save("Same", {**VALUES, "rank": rank})["key"])
        except RunError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=save, args=(n,)) for n in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sum("exists already" not in one for one in outcomes) == 1 and len(own()) == 1
    left = {path.name for path in templates.folder().iterdir() if path.suffix != ".json"}
    assert left == {".lock"}, "no temporary file is left"


SAVER = """
import sys, time
from pathlib import Path
from runs.files import RunError
from ui.new import form, templates
version, rank, start = sys.argv[1:]
values = {**form.defaults(), "rank": int(rank)}
print("ready", flush=True)
while not Path(start).exists():
    time.sleep(0.0005)
try:
    print("saved", templates.save("Same", values, version)["version"])
except RunError as error:
    print(error)
"""


@pytest.mark.slow
def test_of_many_servers_that_save_over_one_version_exactly_one_does_and_the_others_learn_what_it_changed(tmp_path):
    seen, start = templates.save("Same", VALUES)["version"], tmp_path / "start"
    words = [[sys.executable, "-c", SAVER, seen, str(rank), str(start)] for rank in range(1, 5)]
    savers = [subprocess.Popen(one, cwd=ROOT, stdout=subprocess.PIPE, text=True) for one in words]
    for one in savers:
        assert one.stdout.readline() == "ready\n"
    start.touch()
    outcomes = [one.communicate(timeout=60)[0] for one in savers]
    (winner,) = [one.split()[1] for one in outcomes if one.startswith("saved")]
    (stored,) = own()
    rank = templates.values_of(stored["key"], {})["rank"]
    assert stored["version"] == winner
    assert sum(f"Rank {rank}, yours " in one for one in outcomes) == 3, outcomes


def test_rename_delete_and_undo():
    key = templates.save("Old", VALUES)["key"]
    templates.save("Taken", VALUES)
    with pytest.raises(RunError, match="exists already"):
        templates.rename(key, "Taken")
    new = templates.rename(key, "New")
    assert [one["name"] for one in own()] == ["New", "Taken"]
    gone = templates.delete(new["key"])
    assert [one["name"] for one in own()] == ["Taken"]
    templates.restore(gone)
    assert [one["name"] for one in own()] == ["New", "Taken"]
    with pytest.raises(RunError, match="deleted in another window"):
        templates.rename(key, "Other")


def test_a_damaged_template_is_listed_with_its_file_and_can_be_deleted():
    key = templates.save("A", VALUES)["key"]
    path = templates.folder() / f"{key}.json"
    for text in ("", "[]", '{"name": 1, "values": {}}', '{"name": "x"}', "\x00"):
        path.write_text(text)
        (one,) = own()
        assert one["damaged"] and str(path) in one["about"]
    templates.delete(key)
    assert not own()


def test_what_no_longer_exists_is_left_out():
    key = templates.save("A", {**VALUES, "model": "flux-dev", "tier": "12G"})["key"]
    path = templates.folder() / f"{key}.json"
    table = json.loads(path.read_text())
    table["values"] |= {"model": "gone", "unheard": 1, "rank": [1]}
    path.write_text(json.dumps(table))
    values = templates.values_of(key, {})
    assert values["model"] == form.defaults()["model"] and values["tier"] == "12G" and "unheard" not in values
    assert "rank" not in values


def test_built_in_templates_have_words_and_make_valid_runs():
    built_in = [one for one in templates.listing() if not one["own"]]
    assert {one["key"] for one in built_in} >= {"person", "style", "object"}
    for one in built_in:
        assert one["about"].endswith(".")
        values = templates.values_of(one["key"], {"trigger": " ohwx  cat "})
        assert "{trigger}" not in str(values) and ("prompts" not in values or "ohwx cat" in values["prompts"])
        form.spec_of({**form.defaults(), "name": "x", "trigger": "ohwx", **values})


@pytest.mark.parametrize("name", ["", "  ", "\0", "x" * 81, None, 7, ["a"]])
def test_a_name_must_be_one_line(name):
    with pytest.raises(RunError, match="1 to 80 characters"):
        templates.save(name, VALUES)


@pytest.mark.parametrize("key", ["../x", "", None, "a" * 25, "/etc/passwd", "A" * 24, 3])
def test_a_key_is_never_a_path(key):
    for act, *more in ((templates.delete,), (templates.rename, "x"), (templates.values_of, {})):
        with pytest.raises(RunError, match="no such template"):
            act(key, *more)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    st.text(max_size=90),
    st.dictionaries(st.text(max_size=6), st.integers() | st.text(max_size=20) | st.none(), max_size=4),
)
def test_any_name_and_values_stay_inside_the_folder(name, values):
    try:
        saved = templates.save(name, values)
    except RunError:
        return
    assert {path.name for path in templates.folder().parent.iterdir()} == {"templates"}
    assert templates.delete(saved["key"])["name"] == saved["name"]
