"""Parts of the patches by themselves: queues of trackers, loader settings, images, samples, exit, settings."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import children
import patches_helpers as helpers
import pytest

from guards import limits, npz
from sd_scripts_patches import dataloader, heartbeat, hygiene, images, sampling, session, timeouts, trackers


class Tracker:
    """Keeps its entries. While `stuck` is clear, calls wait."""

    name = "toy"

    def __init__(self):
        self.rows, self.finished, self.stuck = [], False, threading.Event()
        self.stuck.set()

    def log(self, values, step=None):
        self.stuck.wait(30)
        self.rows.append((step, values))

    def finish(self):
        self.stuck.wait(30)
        self.finished = True


@pytest.fixture
def tracker(monkeypatch):
    monkeypatch.setenv("HANGPROOF_TRACKER_TIMEOUT_S", "0.5")
    made = Tracker()
    trackers.decouple(made)
    yield made
    made.stuck.set()


def test_entries_arrive_in_order_and_as_they_were_when_logged(tracker):
    values = {"loss": 0}
    for step in range(50):
        values["loss"] = step
        tracker.log(values, step=step)
    tracker.finish()
    assert tracker.rows == [(step, {"loss": step}) for step in range(50)]
    assert tracker.finished


def test_a_stuck_tracker_costs_the_trainer_nothing(tracker, capsys):
    tracker.stuck.clear()
    start = time.monotonic()
    for step in range(1500):
        tracker.log({"loss": 0.5}, step=step)
    tracker.finish()
    assert time.monotonic() - start < 25, "the tracker itself waits 30 s for each entry"
    log = capsys.readouterr().err
    assert log.count("does not respond; the run continues and drops its entries") == 1
    assert "waited 0.5 s for tracker toy to log its last entries; continuing without it" in log


def patched_module(init):
    module = ModuleType("library.train_util")
    module.prepare_accelerator, module.init_trackers = (lambda args: args), init
    helpers.apply(trackers.PATCH, module)
    return module


@pytest.mark.parametrize("fault", ["hangs", "fails"])
def test_a_tracker_that_does_not_start_is_started_once_more_offline_or_left_out(monkeypatch, capsys, fault):
    monkeypatch.setenv("HANGPROOF_TRACKER_TIMEOUT_S", "0.3")
    monkeypatch.setenv("WANDB_MODE", "")  # so that what is set here is removed again
    monkeypatch.delenv("WANDB_MODE")

    def init(accelerator, args, name):
        if fault == "hangs" and os.environ.get("WANDB_MODE") != "offline":
            time.sleep(30)
        accelerator.trackers.append(Tracker())
        if fault == "fails":
            raise ConnectionError("no route")

    names = ["wandb"] if fault == "hangs" else ["tensorboard"]
    made = SimpleNamespace(log_with=names, trackers=[], is_main_process=True)
    patched_module(init).init_trackers(made, None, "run")
    assert len(made.trackers) == (fault == "hangs")
    reason = "waited 0.3 s for trackers to start (wandb)" if fault == "hangs" else "ConnectionError: no route"
    assert f"{reason}; the run continues offline" in capsys.readouterr().err


def test_only_rank_0_tracks_and_the_key_goes_to_wandb_without_a_login(monkeypatch):
    module = patched_module(lambda *a: None)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("RANK", "1")
    args = module.prepare_accelerator(SimpleNamespace(log_with="wandb", logging_dir="logs", wandb_api_key="k"))
    assert (args.log_with, args.logging_dir) == (None, None) and "WANDB_API_KEY" not in os.environ
    monkeypatch.setenv("RANK", "0")
    args = module.prepare_accelerator(SimpleNamespace(log_with="wandb", logging_dir="logs", wandb_api_key="k"))
    assert (args.log_with, args.wandb_api_key, os.environ.pop("WANDB_API_KEY")) == ("wandb", None, "k")


@pytest.mark.parametrize(
    ("platform", "given", "made"),
    [
        ("linux", {"num_workers": 2}, {"num_workers": 2, "timeout": 60.0, "pin_memory": True}),
        ("linux", {"num_workers": 2, "timeout": 7}, {"num_workers": 2, "timeout": 7}),
        ("win32", {"num_workers": 8, "persistent_workers": True}, {"num_workers": 0, "persistent_workers": False}),
        (
            "darwin",
            {"num_workers": 8, "prefetch_factor": 4},
            {"num_workers": 0, "prefetch_factor": None, "timeout": 0.0},
        ),
    ],
)
def test_every_loader_is_made_with_settings_that_cannot_hang(monkeypatch, platform, given, made):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dataloader.sys, "platform", platform)
    got = {}

    def init(self, dataset, batch_size=1, num_workers=0, pin_memory=False, timeout=0, prefetch_factor=None, persistent_workers=False):  # fmt: skip
        got.update(locals())

    dataloader._safe_settings(init)(None, [1, 2], **given)
    assert {name: got[name] for name in made} == made
    assert got["dataset"] == [1, 2]


@pytest.mark.parametrize(("every", "expected"), [("", []), ("0", []), ("3", [3, 6])])
def test_the_gpus_cache_is_emptied_only_on_request(monkeypatch, every, expected):
    torch = pytest.importorskip("torch")
    emptied, steps = [], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(steps[-1]))
    monkeypatch.setattr(session, "on_step", [])
    monkeypatch.setenv("HANGPROOF_EMPTY_CACHE_STEPS", every)
    hygiene.prepare(worker=False)
    for step in range(1, 8):
        steps.append(step)
        for function in session.on_step:
            function(step)
    assert emptied == expected


def test_git_that_does_not_answer_costs_ten_seconds_at_most(monkeypatch, capsys):
    assert limits.TABLE["git_timeout_s"].default_s == 10
    monkeypatch.setenv("HANGPROOF_GIT_TIMEOUT_S", "0.3")
    module = ModuleType("library.train_util")
    module.get_git_revision_hash = lambda: time.sleep(3600)
    helpers.apply(hygiene.PATCH, module)
    assert module.get_git_revision_hash() == "(unknown)"
    assert "waited 0.3 s for git rev-parse" in capsys.readouterr().err


def images_module(load, batches=6):
    """What the images patch uses of sd-scripts: a group of one data set of `batches`, each of one image."""
    module = ModuleType("library.train_util")

    class BaseDataset:
        caching_mode = None

        def get_image_size(self, path):
            return load(path, False)

    class DatasetGroup:
        def __init__(self):
            self.datasets = [BaseDataset()]

        def __len__(self):
            return batches

        def __getitem__(self, index):
            return module.load_image(f"{index}.png", False)

    module.load_image, module.BaseDataset, module.DatasetGroup = load, BaseDataset, DatasetGroup
    helpers.apply(images.PATCH, module)
    return module, DatasetGroup()


@pytest.fixture
def nothing_unreadable(monkeypatch):
    monkeypatch.setattr(images, "_unreadable", set())


def test_the_replacement_of_a_batch_depends_on_the_index_alone(nothing_unreadable, capsys):
    def load(path, alpha):
        if path in ("2.png", "3.png", "5.png"):
            raise SyntaxError("broken PNG file")
        return path

    _, data = images_module(load)
    for _ in range(2):
        assert [data[i] for i in (5, 2, 3, 0, 2)] == ["0.png", "4.png", "4.png", "0.png", "4.png"]
    log = capsys.readouterr().err
    assert "batch 2 is replaced by the next one" in log and "(3 of at most 10 unreadable images)" in log
    assert "image 2.png cannot be read (SyntaxError: broken PNG file)" in log


def test_too_many_unreadable_images_end_the_run_with_a_name(nothing_unreadable, monkeypatch):
    def load(path, alpha):
        raise FileNotFoundError(2, "No such file or directory", path)

    _, data = images_module(load)
    monkeypatch.setenv("HANGPROOF_SKIP_IMAGES", "3")
    with pytest.raises(OSError, match=r"image 3\.png cannot be read \(FileNotFoundError") as caught:
        data[0]
    assert type(caught.value) is OSError  # a parent process can unpickle it
    monkeypatch.setenv("HANGPROOF_SKIP_IMAGES", "0")
    with pytest.raises(OSError, match=r"image 0\.png cannot be read"):
        data[0]


def test_what_a_restart_can_repair_is_not_replaced(nothing_unreadable, monkeypatch):
    """A disk that does not answer, and a damaged cache, which is encoded anew."""
    monkeypatch.setenv("HANGPROOF_IMAGE_TIMEOUT_S", "0.3")
    module, data = images_module(lambda path, alpha=False: time.sleep(3600))
    with pytest.raises(TimeoutError, match=r"waited 0\.3 s for image 1\.png"):
        data[1]
    with ThreadPoolExecutor(1) as pool, pytest.raises(TimeoutError, match=r"waited 0\.3 s for image 9\.png"):
        pool.submit(module.load_image, "9.png").result()  # as while caching: no alarm reaches a pool's thread
    with pytest.raises(TimeoutError, match=r"waited 0\.3 s for the size of image 9\.png"):
        data.datasets[0].get_image_size("9.png")
    _, data = images_module(lambda path, alpha: path)
    monkeypatch.setattr(type(data), "__getitem__", images._replace_unreadable(lambda self, i: npz.load("damaged.npz")))
    monkeypatch.setattr(npz, "load", lambda path: (_ for _ in ()).throw(ValueError(f"{path} is damaged")))
    with pytest.raises(ValueError, match=r"damaged\.npz is damaged"):
        data[1]


def test_a_prompt_file_damaged_during_the_run_costs_only_the_samples(capsys):
    torch = pytest.importorskip("torch")

    def sample_images(*args):
        torch.manual_seed(7)
        raise ValueError("prompts.txt: no such option --q")

    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert sampling._sample_all(sample_images)() is None
    assert torch.equal(torch.get_rng_state(), before)
    assert "sample images skipped: ValueError: prompts.txt: no such option --q" in capsys.readouterr().err


def test_a_skipped_image_leaves_the_vae_on_its_device(monkeypatch, capsys):
    class Vae:
        device = "cpu"

        def decode(self, x):
            raise MemoryError("no memory for a picture")

        def to(self, device):
            self.device = device

    def sample_image_inference(vae, prompt):
        vae.to("cuda")
        vae.decode(None)

    vae = Vae()
    sampling._sample_one(sample_image_inference)(vae, {"enum": 2})
    assert vae.device == "cpu"
    assert "sample image 3 skipped: MemoryError: no memory for a picture" in capsys.readouterr().err


def test_phases_nest_and_the_record_keeps_the_one_that_failed():
    beat = session.heartbeat()
    beat.phase("step")
    with session.phase("save"):
        with session.phase("hash"):
            assert beat.current_phase == "hash"
        assert beat.current_phase == "save"
    assert beat.current_phase == "step"
    with pytest.raises(OSError), session.phase("save"):
        raise OSError("disk full")
    assert beat.current_phase == "save"
    beat.phase("step")


def test_once_a_minute_the_log_shows_the_progress(monkeypatch, capsys):
    clock = [1000.0]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(session, "nested_phase_end_s", 0.0)

    def train(every):
        monkeypatch.setenv("HANGPROOF_PROGRESS_LINE_S", every)
        loop = heartbeat.TrainingLoop(SimpleNamespace(max_train_steps=100))
        for step in range(1, 101):
            clock[0] += 2.0
            loop.losses.append(0.25)
            loop.record_step(step)
            loop.step_start_s = clock[0]
        return capsys.readouterr().err.splitlines()

    lines = train("")
    assert lines == [f"hangproof: step {n} of 100, epoch 0, loss 0.25, 2.00 s per step" for n in (30, 60, 90)]
    assert len(train("20")) == 10 and train("0") == []


def test_a_flag_wins_over_the_environment_and_reaches_children(monkeypatch):
    for name in ("HANGPROOF_GIT_TIMEOUT_S", "HANGPROOF_SKIP_IMAGES"):
        monkeypatch.setenv(name, "")  # so that monkeypatch removes what the test sets
    monkeypatch.setenv("HANGPROOF_NPZ_TIMEOUT_S", "7")
    flags = ["--lr", "1", "--hangproof_npz_timeout_s=9", "--hangproof_git_timeout_s", "2"]
    assert timeouts.take_flags(flags) == ["--lr", "1"]
    assert limits.seconds("npz_timeout_s") == 9 and os.environ["HANGPROOF_GIT_TIMEOUT_S"] == "2"
    with pytest.raises(timeouts.UsageError, match="HANGPROOF_SKIP_IMAGES='many': expected a whole number"):
        timeouts.take_flags(["--hangproof_skip_images=many"])


THREADS = """
import gc, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from sd_scripts_patches import locate
gc.callbacks.append(lambda *about: sum(range(500)))  # Python code while a tree is built, as Hypothesis has it: threads change there
gc.set_threshold(50)
sys.setswitchinterval(1e-6)
files = 2 * sorted(Path("sd_scripts_patches").glob("*.py"))
with ThreadPoolExecutor(4) as pool:
    print(len(list(pool.map(locate.parse_uncached, files))) == len(files))
"""


def test_files_are_parsed_by_several_threads_at_once():
    """Python 3.11 raises SystemError when two threads build syntax trees at the same time."""
    done = children.run(THREADS)
    assert done.stdout == "True\n", done.stderr[-2000:]
