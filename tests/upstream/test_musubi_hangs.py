"""Each known hang, injected into the real musubi-tuner: the process exits in time, and the log names what it waited for."""

import contextlib
import os
import re
import shutil
from functools import partial

import hub_server
import patches_helpers as helpers
import psutil
import pytest
import resume_helpers
import tiny_musubi as tiny

WORKER = """
import os, signal, time
original, read = module.BucketBatchManager.__getitem__, [0]
def __getitem__(self, index):
    read[0] += 1
    if read[0] == 3:
        {before}
        print(f"HANG {{time.monotonic()}} pid {{os.getpid()}}", flush=True)
        {hang}
    return original(self, index)
module.BucketBatchManager.__getitem__ = __getitem__
"""
TRACKER = """
import accelerate.tracking, time
def hang(*args, **kwargs):
    print(f"HANG {time.monotonic()}", flush=True)
    time.sleep(3600)
accelerate.tracking.TensorBoardTracker.__init__ = hang
"""
POOL = """
import time
from concurrent.futures import ThreadPoolExecutor
pool, save = ThreadPoolExecutor(1), module.save_state_on_train_end
def save_state_on_train_end(*args, **kwargs):
    save(*args, **kwargs)
    pool.submit(time.sleep, 3600)
    print(f"HANG {time.monotonic()}", flush=True)
module.save_state_on_train_end = save_state_on_train_end
"""
OFFLOADER = """
import time
from concurrent.futures import ThreadPoolExecutor
from musubi_tuner.modules import custom_offloading_utils as utils
pool = ThreadPoolExecutor(1)
print(f"HANG {time.monotonic()}", flush=True)
"""
FUTURE = """
offloader = utils.ModelOffloader.__new__(utils.ModelOffloader)
offloader.futures, offloader.num_blocks, offloader.blocks_to_swap = {3: pool.submit(time.sleep, 3600)}, 4, 1
offloader.debug = offloader.supports_backward = False
offloader.wait_for_block(3)
"""
COPIER = """
copier = utils._StagedCopier.__new__(utils._StagedCopier)
copier._futures = {3: pool.submit(time.sleep, 3600)}
copier.wait(3)
"""
STREAM = """
class Stream:
    def synchronize(self):
        time.sleep(3600)
copier = utils._DirectCopier.__new__(utils._DirectCopier)
copier.copy_stream = Stream()
copier.sync()
"""
TOKENIZER = """
import time
from musubi_tuner.zimage import zimage_utils
print(f"HANG {time.monotonic()}", flush=True)
zimage_utils.Qwen2Tokenizer.from_pretrained("me/model")
"""
TOKENIZER_TWICE = """
import os, urllib.error, urllib.request
from musubi_tuner.zimage import zimage_utils
for _ in range(2):
    made = zimage_utils.Qwen2Tokenizer.from_pretrained("me/model", subfolder=None)
    print("words", len(made), flush=True)
    try:
        urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/loaded", timeout=60)
    except urllib.error.HTTPError:
        pass
"""
UPLOAD = """
import time
original = module.upload
def upload(*args, **kwargs):
    print(f"HANG {time.monotonic()}", flush=True)
    return original(*args, **kwargs)
module.upload = upload
"""
STATE = """
import time
original = module.NetworkTrainer.resume_from_local_or_hf_if_specified
def resume_from_local_or_hf_if_specified(*args, **kwargs):
    print(f"HANG {time.monotonic()}", flush=True)
    return original(*args, **kwargs)
module.NetworkTrainer.resume_from_local_or_hf_if_specified = resume_from_local_or_hf_if_specified
"""
SLOW_SCHEDULER = """
import time
step = module.FlowMatchEulerDiscreteScheduler.step
def slow(*args, **kwargs):
    time.sleep(1)
    return step(*args, **kwargs)
module.FlowMatchEulerDiscreteScheduler.step = slow
"""


def train(folder, *more, prepare=None, family=tiny.Z_IMAGE, **given):
    """Train for two epochs with a fault in a module of musubi-tuner."""
    tiny.cached(tiny.workdir(family), folder, family=family)
    if prepare:
        prepare(folder)
    return again(folder, *more, family=family, **given)


def again(folder, *more, module="", fault="", env=(), family=tiny.Z_IMAGE, **changed):
    settings = dict(env)
    if fault:
        (folder / "fault.py").write_text(fault)
        settings["TINY_FAULTS"] = f"musubi_tuner.{module}={folder / 'fault.py'}"
    work, config = tiny.workdir(family), folder / "dataset.toml"
    more = ("--max_train_epochs", "2", *more)
    args = tiny.arguments(work, config, folder / "made", *more, family=family, **changed)
    command = tiny.command(tiny.trainer(family), *args)
    return helpers.watch(command, tiny.environment(work, **settings), tiny.checkout(), 300)


def worker(folder, hang, before="pass"):
    env = {"HANGPROOF_DATALOADER_TIMEOUT_S": "8", "HANGPROOF_DATALOADER_FIRST_BATCH_S": "60"}
    fault = WORKER.format(hang=hang, before=before)
    return train(folder, module="dataset.bucket", fault=fault, env=env, max_data_loader_n_workers="1")


def probe(folder, source, env=()):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "probe.py").write_text(source)
    settings = tiny.environment(tiny.workdir(), HANGPROOF_BLOCK_SWAP_TIMEOUT_S="1", **dict(env))
    settings["PYTHONPATH"] = f"{folder}:{settings['PYTHONPATH']}"
    command = [str(tiny.python()), "-m", "sd_scripts_patches", "-m", "probe", "--blocks_to_swap"]
    return helpers.watch(command, settings, tiny.checkout(), 200)


def latents(folder):
    return sorted(path for path in (folder / "cache").glob("*_zi.safetensors"))


def not_finite(folder):
    """Replace the last number (float32) of a cache by NaN."""
    path = latents(folder)[2]
    path.write_bytes(path.read_bytes()[:-4] + b"\x00\x00\xc0\x7f")


def fifo(folder):
    path = latents(folder)[2]
    path.unlink()
    os.mkfifo(path)


def damaged(folder, damage):
    """A training run meets a damaged cache; the next one is refused; the caching command makes it again; a third one runs."""
    first = train(folder, prepare=damage)
    second = again(folder)
    commands = tiny.caching(folder / "dataset.toml", "--skip_existing")
    script = "zimage_cache_latents.py"
    env = tiny.environment(tiny.workdir())
    cached = helpers.watch(tiny.command(script, *commands[script]), env, tiny.checkout(), 200)
    return first, second, cached, again(folder)


def image_fifo(folder):
    folder.mkdir(parents=True)
    shutil.copytree(tiny.workdir() / "images", folder / "images")
    (folder / "images/003.png").unlink()
    os.mkfifo(folder / "images/003.png")
    args = tiny.caching(tiny.dataset(folder, folder / "images"))["zimage_cache_latents.py"]
    env = tiny.environment(tiny.workdir(), HANGPROOF_IMAGE_TIMEOUT_S="2")
    return helpers.watch(tiny.command("zimage_cache_latents.py", *args), env, tiny.checkout(), 200)


def tracker(folder):
    more = ["--log_with", "tensorboard", "--logging_dir", str(folder / "logs"), "--save_state"]
    env = {"HANGPROOF_TRACKER_TIMEOUT_S": "2", "HANGPROOF_EXIT_GRACE_S": "2"}
    return train(folder, *more, module="utils.train_utils", fault=TRACKER, env=env)


def pool_thread(folder):
    env = {"HANGPROOF_EXIT_GRACE_S": "2"}
    return train(folder, "--save_state", module="utils.train_utils", fault=POOL, env=env)


class SilentUpload(hub_server.Answers):
    """Answers what a download asks, and says nothing to an upload."""

    def do_POST(self):
        self.server.closing.wait(600)
        self.close_connection = True


@contextlib.contextmanager
def hub(folder, files, **limits):
    """A hub, and the environment of a process that uses it. limits: in seconds."""
    with hub_server.serving(files) as server:
        server.RequestHandlerClass = SilentUpload
        yield (
            server,
            {
                "HF_HUB_OFFLINE": "0",
                "HF_ENDPOINT": server.url,
                "HF_HOME": str(folder / "home"),
                "no_proxy": "127.0.0.1,localhost",
                "HANGPROOF_EXIT_GRACE_S": "2",
                **{f"HANGPROOF_{name.upper()}": value for name, value in limits.items()},
            },
        )


def tokenizer(folder):
    with hub(folder, {"vocab.json": b"{" + b" " * 9000}, hub_timeout_s="2") as (server, env):
        server.faults += [hub_server.Fault("stall", 1000)] * 20
        return probe(folder, TOKENIZER, env)


def tokenizer_twice(folder):
    files = {"vocab.json": b'{"a": 0, "b": 1}', "merges.txt": b"#version: 0.2\n", "tokenizer_config.json": b"{}"}
    with hub(folder, files) as (server, env):
        return probe(folder, TOKENIZER_TWICE, env), [path for _, path, _ in server.requests]


def upload(folder, *more, silent=False):
    more += ("--huggingface_repo_id", "me/model", "--huggingface_path_in_repo", "lora")
    more += ("--huggingface_repo_type", "model", "--huggingface_token", "x")
    with hub(folder, {}, upload_timeout_s="2", upload_exit_s="2") as (server, env):
        server.silent = silent
        return train(folder, *more, module="utils.huggingface_utils", fault=UPLOAD, env=env)


def state_from_hub(folder):
    more = ["--resume", "me/model/tiny-state:main:model", "--resume_from_huggingface"]
    with hub(folder, {"tiny-state/optimizer.bin": bytes(100_000)}, hub_timeout_s="2") as (server, env):
        server.faults += [hub_server.Fault("stall", 1000)] * 20
        return train(folder, *more, module="training.trainer_base", fault=STATE, env=env)


def slow_samples(folder, module, fault, **given):
    more = ["--sample_every_n_epochs", "1", "--sample_prompts", str(folder / "prompts.txt")]
    folder.mkdir(parents=True)
    (folder / "prompts.txt").write_text("a thing --w 64 --h 64 --s 30 --d 1\n")
    env = {"HANGPROOF_SAMPLE_BUDGET_S": "2"}
    return train(folder, *more, module=module, fault=fault, env=env, **given)


JOBS = {
    "worker deaf": partial(
        worker, hang="while True: time.sleep(1)", before="signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    ),
    "future": partial(probe, source=OFFLOADER + FUTURE),
    "copier": partial(probe, source=OFFLOADER + COPIER),
    "stream": partial(probe, source=OFFLOADER + STREAM),
    "cache with NaN": partial(damaged, damage=not_finite),
    "cache on a FIFO": partial(train, prepare=fifo, env={"HANGPROOF_NPZ_TIMEOUT_S": "2"}),
    "image on a FIFO": image_fifo,
    "tracker": tracker,
    "pool thread": pool_thread,
    "slow samples of a bar without items": partial(
        slow_samples, module="qwen_image.qwen_image_utils", fault=SLOW_SCHEDULER, family="qwen_image"
    ),
    "tokenizer": tokenizer,
    "tokenizer twice": tokenizer_twice,
    "upload": partial(upload, silent=True),
    "upload in the background": lambda folder: upload(folder, "--async_upload", "--save_every_n_epochs", "1"),
    "state from the hub": state_from_hub,
}


@pytest.fixture(scope="module")
def started(request, musubi, tmp_path_factory):
    tiny.workdir()
    base = tmp_path_factory.mktemp("hangs")

    def run(name):
        folder = base / name.replace(" ", "-")
        return folder, JOBS[name](folder)

    with helpers.ahead(request, "result", {name: partial(run, name) for name in JOBS}) as futures:
        yield futures


@pytest.fixture
def result(request, started):
    return started[request.param].result()


def workers_gone(result):
    pids = [int(pid) for pid in re.findall(r"HANG \S+ pid (\d+)", result.log)]
    assert pids
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)
    return not alive


@helpers.asks("result", "worker deaf")
def test_a_worker_that_never_delivers(result):
    _, run = result
    assert run.code == 75 and workers_gone(run), run.log[-3000:]
    assert re.search(r"hangproof: waited 8 s for batch \d of the data loader from worker 0 \(pid ", run.log)


@helpers.asks("result", "future")
def test_a_stuck_future_of_block_swap(result):
    _, run = result
    assert run.code == 75, run.log[-3000:]
    assert "waited 1 s for block 3 of 4 to be swapped in (block swap, 1 blocks)" in run.log


@helpers.asks("result", "copier")
def test_a_stuck_future_of_the_copier(result):
    _, run = result
    assert run.code == 75, run.log[-3000:]
    assert "waited 1 s for block 3 to be copied to the device (block swap)" in run.log


@helpers.asks("result", "stream")
def test_a_stream_that_never_finishes(result):
    _, run = result
    assert run.code == 75, run.log[-3000:]
    assert "waited 1 s for all blocks to be copied to the device (block swap)" in run.log


@helpers.asks("result", "cache with NaN")
def test_a_damaged_cache_is_named_and_made_again(result):
    folder, (first, second, cached, third) = result
    path = latents(folder)[2]
    assert first.code == 1 and f"{path} is damaged (" in first.log, first.log[-3000:]
    assert f"renamed to {path.name}.corrupt; run the caching command again" in first.log
    assert second.code == 1 and "1 caches were damaged and have not been made again" in second.log, second.log[-3000:]
    assert str(path) in second.log
    assert cached.code == 0 and third.code == 0, cached.log[-2000:] + third.log[-2000:]
    assert resume_helpers.tensors(path) == resume_helpers.tensors(tiny.workdir() / "cache" / path.name)


@helpers.asks("result", "cache on a FIFO")
def test_a_cache_that_cannot_be_read(result):
    _, run = result
    assert run.code == 1 and "TimeoutError: waited 2 s for cache file " in run.log, run.log[-3000:]


@helpers.asks("result", "image on a FIFO")
def test_an_image_that_cannot_be_read_ends_the_caching_command(result):
    _, run = result
    assert run.code == 1 and re.search(r"TimeoutError: waited 2 s for image \S+003.png", run.log), run.log[-3000:]


@helpers.asks("result", "tracker")
def test_a_tracker_that_never_starts(result):
    folder, run = result
    assert run.code == 0 and "waited 2 s for trackers to start (tensorboard); the run continues offline" in run.log
    assert (folder / "made/tiny.safetensors").is_file() and (folder / "made/tiny-state").is_dir()


@helpers.asks("result", "pool thread")
def test_a_pool_thread_stuck_at_exit(result):
    folder, run = result
    assert run.code == 0, run.log[-3000:]
    assert "waited 2 s at exit for ThreadPoolExecutor-" in run.log
    assert (folder / "made/tiny.safetensors").is_file()


@helpers.asks("result", "slow samples of a bar without items")
def test_a_slow_sample_is_skipped(result):
    folder, run = result
    assert run.code == 0, run.log[-3000:]
    assert run.log.count("sample image 1 skipped: BudgetExceeded: the budget of 2 s was exceeded") == 2
    assert (folder / "made/tiny.safetensors").is_file()


@helpers.asks("result", "tokenizer", "state from the hub")
def test_a_download_that_stalls(result):
    _, run = result
    assert run.code == 75, run.log[-3000:]
    assert re.search(r"hangproof: waited 2 s for a byte of (vocab.json|tiny-state/optimizer.bin) of me/model", run.log)


@helpers.asks("result", "tokenizer twice")
def test_a_tokenizer_whose_cache_is_complete_needs_no_hub(result):
    _, (run, requests) = result
    assert run.code == 0 and len(set(re.findall(r"words \d+", run.log))) == 1, run.log[-3000:]
    assert any(path.endswith("vocab.json") for path in requests)
    assert requests.count("/loaded") == 2 and requests[-2:] == ["/loaded", "/loaded"], requests


@helpers.asks("result", "upload")
def test_an_upload_to_a_silent_hub(result):
    folder, run = result
    assert run.code == 0, run.log[-3000:]
    assert f"waited 2 s for the upload of {folder / 'made/tiny.safetensors'}; the run continues" in run.log
    assert (folder / "made/tiny.safetensors").is_file()


@helpers.asks("result", "upload in the background")
def test_an_upload_in_the_background_does_not_hold_the_exit(result):
    folder, run = result
    assert run.code == 0, run.log[-3000:]
    assert "waited 2 s for 1 uploads to the hub; exiting without them" in run.log
    assert (folder / "made/tiny.safetensors").is_file()
