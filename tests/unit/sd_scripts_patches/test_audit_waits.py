"""The maintainers' list of waits: it finds planted waits and says what ends each. tests/upstream/test_audit_waits.py has real checkouts."""

import re
from pathlib import Path

import audit_waits
import pytest

from sd_scripts_patches import compatibility, registry

PLANTED = """
import subprocess as sp, threading, time
from concurrent.futures import ThreadPoolExecutor, wait as w
import numpy as np, torch
from safetensors.torch import load_file as read

def all_of_them(accelerator, fs, queue, thread, train_dataloader, timesteps, lock, api):
    w(fs)  # future
    w(fs, 9)  # future, limited
    fs[0].result()  # future
    fs[0].result(timeout=5)  # future, limited
    fs[0].result(timeout=None)  # future
    thread.join()  # thread
    ", ".join(fs)
    queue.get()  # queue
    queue.get(block=False)
    {}.get("a")
    lock.acquire(blocking=False)
    accelerator.wait_for_everyone()  # collective
    torch.distributed.all_reduce(fs)  # collective
    sp.run(["x"])  # subprocess
    sp.run(["x"], timeout=1)  # subprocess, limited
    api.upload_file("x")  # hub
    np.load("x")  # file
    read("x")  # file
    open("x")  # file
    open("x", "w")  # save
    torch.nn.Embedding.from_pretrained(fs)
    torch.cuda.current_stream().synchronize()  # stream
    accelerator.end_training()  # tracker
    pool = ThreadPoolExecutor(2)  # exit
    with ThreadPoolExecutor(2) as pool:  # future
        pass
    threading.Thread(target=print, daemon=True).start()
    for batch in enumerate(train_dataloader):  # dataloader
        pass
    while not fs[0].ready:  # polling
        time.sleep(1)
    while fs:
        fs.pop()

def denoise(timesteps):
    for t in timesteps:  # sampling
        pass

class Own:
    def wait(self, index):
        return self.other.wait(index)
"""


def scratch(folder: Path, **files: str) -> Path:
    """A checkout of a few lines with one training script."""
    for name, text in {"train_network": "", "library__x": "", "networks__x": "", **files}.items():
        path = folder / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def ends(folder: Path, patches=None) -> dict[str, str]:
    """Function → what ends the wait in it."""
    return {wait.function: wait.by for wait in audit_waits.audit(folder, patches).waits}


def test_planted_waits_are_found_with_their_kind_and_nothing_else(tmp_path):
    folder = scratch(tmp_path, flux_train_network="import library.planted", library__planted=PLANTED, tools__x=PLANTED)
    found = {w.line: w.kind + (", limited" if w.by == audit_waits.OWN else "") for w in audit_waits.audit(folder).waits}
    planted = {
        number: line.partition("  # ")[2] for number, line in enumerate(PLANTED.splitlines(), 1) if "  # " in line
    }
    assert found == planted


THREADS = """
import queue, threading
class A:
    def begin(self):
        self.inbox = queue.Queue()
        threading.Thread(target=self.{name}, daemon=True).start()
    def {name}(self):
        self.helper_of_{name}()
    def helper_of_{name}(self):
        self.inbox.get()
"""


def test_a_thread_that_nobody_waits_for_is_open_and_one_that_is_waited_for_is_not(tmp_path, capsys):
    watched = THREADS.format(name="watched") + "    def close(self):\n        self.thread.join()\n"
    script = "from library import forgotten, watched\n"
    folder = scratch(
        tmp_path, train_network=script, library__forgotten=THREADS.format(name="lost"), library__watched=watched
    )
    found = ends(folder)
    assert found["A.helper_of_lost"] == audit_waits.OPEN
    assert found["A.helper_of_watched"] == found["A.close"] == audit_waits.PHASE
    assert audit_waits.main([str(folder)]) == 1 and "1 open" in capsys.readouterr().out
    (folder / "library/forgotten.py").write_text("")
    assert audit_waits.main([str(folder)]) == 0


def test_a_patch_ends_the_waits_in_its_target_only_where_it_is_there(tmp_path):
    text = "class Offloader:\n    def _wait_blocks_move(self, block_idx):\n        self.futures[0].result()\n"
    names = {"train_network": "import library.custom_offloading_utils", "library__custom_offloading_utils": text}
    folder = scratch(tmp_path, **names)
    assert ends(folder) == {"Offloader._wait_blocks_move": "block_swap"}
    without = [patch for patch in registry.patches() if patch.name != "block_swap"]
    assert ends(folder, without) == {"Offloader._wait_blocks_move": audit_waits.PHASE}
    scratch(folder, **names | {"library__custom_offloading_utils": text.replace("_wait_blocks", "_await_blocks")})
    assert ends(folder) == {"Offloader._await_blocks_move": audit_waits.PHASE}


def test_what_another_checkout_has_too_is_left_out_of_a_comparison(tmp_path, capsys):
    old = scratch(tmp_path / "old", train_network="def main(fs):\n    fs[0].result()\n")
    moved = "def main(fs):\n    fs[0].result()\ndef more(fs):\n    fs[1].result()\n"
    new = scratch(tmp_path / "new", train_network="import library.moved", library__moved=moved)
    assert audit_waits.main([str(new), "--against", str(old)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 and "library/moved.py:4  more  fs[1].result(…)" in shown[0]


@pytest.mark.parametrize("cover", audit_waits.COVERS, ids=lambda cover: f"{cover.patch} {cover.where} {cover.kind}")
def test_every_row_names_a_patch_and_targets_that_it_replaces(cover):
    patches = [one for trainer in compatibility.MARKERS for one in registry.patches(trainer) if one.name == cover.patch]
    replaced = [t.name for patch in patches for t in patch.targets if t.make and re.fullmatch(cover.targets, t.name)]
    assert patches and (replaced or cover.where == audit_waits.ANYWHERE)


def test_a_file_that_cannot_be_read_is_named_and_a_folder_that_is_no_checkout_is_wrong_usage(tmp_path, capsys):
    folder = scratch(tmp_path, train_network="import library.broken", library__broken="def broken(:\n")
    assert audit_waits.main([str(folder)]) == 1
    assert "not read: library/broken.py: " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        audit_waits.main([str(tmp_path / "none")])
    assert "is not a checkout of sd-scripts or musubi-tuner" in capsys.readouterr().err
