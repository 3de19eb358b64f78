"""The run page shows a run's folder. Hostile text stays text, and a broken file affects only its own part."""

import builtins
import errno
import io
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from ui_helpers import lora_file, write_incident, write_run
from ui_markup import HOSTILE, harmless, sample

from guards import reading
from monitor.state import read_status
from ui import served
from ui.api.runs import run_samples
from ui.run import cards, run_page, samples, view


def everything(folder) -> str:
    """All parts of one run's page."""
    parts = run_page.render(folder.name, "")
    return "".join(part for part in parts[2:9] if isinstance(part, str))


def test_hostile_text_stays_text(data):
    folder = write_run(data, HOSTILE, message=HOSTILE, reason=HOSTILE, phase=HOSTILE, checkpoint={"step": HOSTILE})
    known = dict.fromkeys(("cause", "changed", "phase", "kind"), HOSTILE)
    write_incident(folder, report=HOSTILE + "\n\n# " + HOSTILE, **known)
    (folder / "training.log").write_text(HOSTILE * 3)
    sample(folder, "x'><script>alert(1)<.png")
    markup = everything(folder)
    harmless(markup)
    assert "alert(2)" in markup  # shown, as text
    [other] = run_samples(folder.name)["others"]
    assert other["url"].count("<") == 0


def test_nobody_waits_while_the_long_history_of_another_run_is_read(data):
    long, other = (write_run(data, name) for name in ("long", "other"))
    look = lambda: (len(view.read_all()), view.with_metrics(other, lambda one: one.restarts))  # noqa: E731
    with ThreadPoolExecutor(1) as pool:
        assert view.with_metrics(long, lambda _: pool.submit(look).result(20)) == (2, [])


def test_a_run_whose_monitor_is_gone_is_not_shown_as_running(data):
    folder = write_run(data, state="running", checkpoint={"path": "x", "step": 30})
    shown = view.read(folder)
    assert not shown.alive and shown.state == "orphaned"
    assert "Press Resume" in cards.head(shown)
    buttons = run_page._buttons(shown)
    assert not buttons["stop"]["visible"] and not buttons["total"]["visible"]
    assert buttons["go"] == {"visible": True, "value": "Resume"}
    (folder / "status.json").write_bytes(b"")  # as a power cut leaves it
    (folder / "monitor.json").write_text('{"state": "running", "best_step": 30}')
    assert view.read(folder).state == "orphaned"
    (folder / "status.json").unlink()  # as one that never started
    shown = view.read(folder)
    assert shown.state == "new" and run_page._buttons(shown)["go"] == {"visible": True, "value": "Start"}
    assert everything(folder)
    (folder / "run.toml").write_text("name = [")
    assert "run.toml cannot be read" in cards.head(view.read(folder))
    shown = view.read(write_run(data, "failed", state="failed", checkpoint=None, reason="out of memory"))
    assert shown.start_label == "Start again" and "press Start again to start over" in cards.head(shown)


def test_a_status_that_is_being_replaced_on_windows_is_read_again(data, monkeypatch):
    folder, tries = write_run(data, state="completed"), []

    def refused(path, *more, **options):
        if str(path).endswith("status.json") and len(tries) < 2:
            tries.append(path)
            raise PermissionError(errno.EACCES, "Permission denied")
        return original(path, *more, **options)

    original = open
    monkeypatch.setattr(reading, "SHORTAGES", (errno.EACCES,))
    for module in (builtins, io):
        monkeypatch.setattr(module, "open", refused)
    shown = view.read(folder)
    assert (shown.state, shown.problem, len(tries)) == ("completed", "", 2)
    tries.clear()
    assert read_status(folder)["state"] == "completed" and len(tries) == 2, "the monitor's commands, too"


def lora_cards(folder) -> str:
    return cards.loras(folder, view.loras(folder), view.evolution(folder), None)


def test_a_completed_run_offers_its_lora_and_longer_training(data):
    folder = write_run(data, "done run", state="completed", step=100)
    (folder / "run.toml").write_text('name = "done run"\nepochs = 16\n', "utf-8-sig")  # as Windows' editors write it
    assert "hp-loras" not in everything(folder)  # without the file there is no download
    lora_file(folder / "done-run.safetensors", 100, values=625_000)
    shown = view.read(folder)
    link = harmless(lora_cards(folder)).attributes
    assert link["download"] == ["done-run.safetensors"] and link["href"][0].startswith("gradio_api/file=/")
    assert "2.5 MB" in lora_cards(folder) and "Final LoRA · step 100" in lora_cards(folder) and shown.progress == 1.0
    buttons = run_page._buttons(shown)
    assert not buttons["stop"]["visible"] and buttons["go"] == {"visible": True, "value": "Train longer"}
    assert buttons["total"] == {"visible": True, "value": 16, "label": "Total epochs"}
    (folder / "run.toml").write_text('name = "done run"\nepochs = 16\nmax_train_steps = 500\n')
    assert run_page._buttons(view.read(folder))["total"] == {"visible": True, "value": 500, "label": "Total steps"}
    (folder / "run.toml").write_text('name = "done run"\n')
    assert not run_page._buttons(view.read(folder))["go"]["visible"]  # the length of the run is unknown


ABSURD = f'"phase": "save", "phase_total": NaN, "phase_done": 1e999, "step": 1{"0" * 400}, "loss": -1{"0" * 400}'


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"state": 7}', '{"state": "running", "step": "x", "eta_s": [], "loss": {}}'),
        f'{{"state": "running", {ABSURD}, "updated_at": "0001-01-01T00:00:00+12:00"}}',
    ],
)
def test_a_broken_status_file_affects_only_its_own_run(data, content):
    good, broken = write_run(data, "good"), write_run(data, "broken")
    (broken / "status.json").write_text(content)
    (broken / "metrics.jsonl").write_text('{"kind":"step","step":1,"loss":1}\nnot json\n[]\n{"kind":"step","step":"x"}')
    write_incident(broken, step=1, resumed_from=[], explanation=5)  # as a hostile store may have it
    harmless(everything(broken))
    for name in ("status.json", "incidents/0001/incident.json", "run.toml"):
        (broken / name).write_text("a = " * name.endswith("toml") + "[" * 50_000)  # too deep for its parser
    assert "nested" in (problem := view.read(broken).problem) or "recursion" in problem, problem
    harmless(everything(broken))
    assert "good" in run_page.render(good.name, "")[2]


def test_every_complete_lora_is_listed_with_its_samples_the_final_one_first(data):
    folder = write_run(data, "r", state="stopped")
    for name, step, epoch in (("r-step00000100", 100, 1), ("r-000004", 400, 4), ("r", 500, 5)):
        lora_file(folder / f"{name}.safetensors", step, epoch)
    lora_file(folder / ".r-step00000200.safetensors.17.tmp.safetensors", 200)
    whole = lora_file(folder / "r-step00000300.safetensors", 300).read_bytes()
    (folder / "r-step00000300.safetensors").write_bytes(whole[:-10])  # being written
    (folder / "notes.safetensors").write_text("I am text")
    sample(folder, "r_000100_00_20260101120000_42.png")
    sample(folder, "r_e000004_00_20260101120000_42.png")
    found = view.loras(folder)
    assert [one.path.name for one in found] == ["r.safetensors", "r-000004.safetensors", "r-step00000100.safetensors"]
    assert [(one.final, one.step, one.epoch) for one in found] == [(True, 500, 5), (False, 400, 4), (False, 100, 1)]
    drawn = harmless(lora_cards(folder)).attributes["alt"]
    assert drawn == ["Sample of prompt 1, epoch 4", "Sample of prompt 1, step 100"]
    (folder / "r-step00000300.safetensors").write_bytes(whole)
    assert len(view.loras(folder)) == 4
    tags = harmless(lora_cards(folder))
    downloads = tags.attributes["download"]  # each LoRA, and all as one ZIP
    assert downloads[0] == "r.safetensors" and len(downloads) == 5
    for name in ("r-000004", "r-step00000100", "r"):  # without metadata, its name says the step or epoch
        lora_file(folder / f"{name}.safetensors")
    assert [one.at for one in view.loras(folder)] == ["r.safetensors", "step 300", "step 100", "epoch 4"]


def test_thousands_of_samples_are_drawn_and_looked_up_again_only_after_a_change(data, monkeypatch):
    """The page asks every second: with 400 LoRAs and 2,000 samples, all of its time went into the same markup."""
    folder, made = write_run(data, "r", state="stopped"), []
    lora_file(folder / "r-step00000100.safetensors", 100)
    drawn = sample(folder, "r_000100_00_20260101120000_42.png")
    monkeypatch.setattr(cards, "CARD", lambda name, *more, card=cards.CARD: made.append(name) or card(name, *more))
    monkeypatch.setattr(served, "find", lambda text, find=served.find: made.append("find") or find(text))
    for _ in range(3):
        first = lora_cards(folder), samples.pictures(view.evolution(folder))
    assert made == ["loras", "find"] and "picked" not in first[0]
    sample(folder, "r_000100_01_20260101120000_42.png")
    assert lora_cards(folder).count("<img") == 2 and made == ["loras", "find", "loras"]
    assert len(samples.pictures(view.evolution(folder))) == 2 and made[3:] == ["find"]
    drawn.unlink()
    assert len(samples.pictures(view.evolution(folder))) == 1
    assert "picked" in cards.loras(folder, view.loras(folder), view.evolution(folder), 100)
    monkeypatch.setattr(cards, "NEWEST", 1)  # the markup of 5,000 LoRAs is 3.8 MB, and each new one sends all of it
    lora_file(folder / "r-step00000200.safetensors", 200)
    shown = lora_cards(folder)
    assert "2 LoRAs" in shown and shown.count("<li") == 1 and f"1 older: in {folder}" in shown and "r.zip" in shown


def test_a_name_that_is_not_utf_8_is_left_out(data):
    """As an old ZIP leaves it. The browser cannot be sent it, and the rest of the page would not arrive either."""
    folder = write_run(data, "cat", state="completed")
    (folder / "sample").mkdir()
    lora_file(folder / "cat.safetensors")
    odd = os.fsdecode(b"caf\xe9_000008_00_20260101120000")
    try:
        shutil.copytree(folder, folder.with_name(odd))
    except OSError:
        pytest.skip("this file system has no such names")
    for name in (folder / f"{odd}.safetensors", folder / "sample" / f"{odd}.png"):
        shutil.copy(folder / "cat.safetensors", name)
    shown = run_page.render("cat", "")
    assert [one.folder.name for one in view.read_all()] == ["cat"]
    assert len(view.loras(folder)) == 1 and samples.pictures(view.evolution(folder)) == []
    assert "cat.safetensors" in "".join(part for part in shown if isinstance(part, str)).encode().decode()
