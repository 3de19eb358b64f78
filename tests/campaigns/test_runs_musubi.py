"""A rendered script of musubi-tuner, killed in each of its three commands, ends as the undisturbed one."""

import subprocess
import sys
import time
from collections.abc import Callable

import psutil
from monitor_helpers import events
from musubi_helpers import caches, environment, run_of
from runs_helpers import PROJECT

from benchmarks.trial import Job, read_end, read_lines, started

CACHING = {"_zi": "zimage_cache_latents.py", "_zi_te": "zimage_cache_text_encoder_outputs.py"}
SLOW = """
import time
def slow(original):
    def save(*args, **kwargs):
        time.sleep(0.4)
        return original(*args, **kwargs)
    return save
module.save_latent_cache_z_image = slow(module.save_latent_cache_z_image)
module.save_text_encoder_output_cache_z_image = slow(module.save_text_encoder_output_cache_z_image)
"""


def until(condition: Callable[[], object], process: subprocess.Popen, what: str) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert process.poll() is None and time.monotonic() < end, f"{what}: exit code {process.poll()}"
        time.sleep(0.05)


def kill(process: subprocess.Popen, script: str) -> None:
    """SIGKILL the process that runs a script, not its launcher."""
    for child in psutil.Process(process.pid).children(recursive=True):
        words = child.cmdline()
        if any(script in word for word in words) and child.name() != "bash" and "launch" not in words:
            child.kill()


def test_killed_in_each_of_its_three_commands_it_ends_as_undisturbed(toy_z, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW)
    fault = f"musubi_tuner.dataset.image_video_dataset={slow}"
    losses = {}
    for name, kills in (("calm", False), ("killed", True)):
        folder = run_of(toy_z, name)
        more = {"TINY_FAULTS": fault, "TINY_STEP_S": "0.3"} if kills else {}
        env = environment(toy_z, tmp_path / "data", **more)
        log = tmp_path / f"{name}.log"
        with started(Job([sys.executable, "-m", "monitor", "run", name], log, folder, env, PROJECT), {}) as process:
            if kills:
                for kind, script in CACHING.items():
                    until(lambda: len(caches(folder, kind)) >= 2, process, kind)  # noqa: B023
                    latents = caches(folder, "_zi")
                    kill(process, script)
                until((folder / "killed-step00000006-state/hangproof.json").is_file, process, "training")
                kill(process, "zimage_train_network.py")
            code = process.wait(400)
        assert code == 0, read_end(log)
        rows = read_lines(folder / "metrics.jsonl")
        losses[name] = {row["step"]: (row["loss"], row["lr"]) for row in rows if "loss" in row}
    assert losses["killed"] == losses["calm"] and list(losses["calm"]) == list(range(1, 13))
    assert caches(folder, "_zi") == latents, "finished caches are not made again"
    assert [event["phase"] for event in events(folder, "crash")] == ["cache_latents", "cache_text", "step"]
