"""Runs side by side, and a run's LoRAs as one archive."""

import json
import urllib.request
import zipfile

from PIL import Image
from ui_helpers import lora_file, serving, write_incident, write_run
from ui_page import a_tab


def a_run(data, name: str, rate: float, rank: int = 8, losses: int = 60, **extra):
    """A run with settings, losses, a GPU's samples and one image."""
    folder = write_run(
        data, name, state="completed", planned_steps=losses, step=losses, loss=rate * 100, restarts=1, step_s=0.5
    )
    lines = [f"name = {json.dumps(name)}", f"learning_rate = {rate}", f"rank = {rank}", 'model = "tiny"', "[extra]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in extra.items()]
    (folder / "run.toml").write_text("\n".join(lines) + "\n")
    steps = [
        {
            "kind": "step",
            "t": f"2026-11-22T12:00:{n % 60:02d}.000Z",
            "attempt": 1,
            "step": n,
            "loss": rate * 100 / n,
            "lr": rate,
            "step_s": 0.5,
        }
        for n in range(1, losses + 1)
    ]
    gpu = [
        {"kind": "gpu", "t": "2026-11-22T12:00:05Z", "gpu": 0, "memory_used": used, "memory_total": 24e9}
        for used in (7e9, rank * 1e9)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*steps, *gpu]))
    (folder / "sample_prompts.txt").write_text("a cat --w 64\n")
    (folder / "sample").mkdir()
    for step in (20, losses):
        Image.new("RGB", (32, 32), (rank, step, 9)).save(
            folder / "sample" / f"{folder.name}_{step:06d}_00_20261122120000.png"
        )
    return folder


def test_runs_are_compared_and_downloaded_on_the_page(browser, tmp_path):
    with serving(tmp_path / "data") as server:
        low = a_run(server.data, "low", 1e-4)
        a_run(server.data, "high", 1e-3, rank=16)
        a_run(server.data, "other", 1e-3, rank=32)
        for step in (20, 60):
            lora_file(low / f"low-step{step:06d}.safetensors", step, values=300_000)
        write_incident(low, step=30)
        with a_tab(browser) as page:
            page.goto(f"{server.url}/?run=low")
            page.get_by_test_id("fold-compare").locator("summary").click()
            page.get_by_role("checkbox", name="high").check()
            page.get_by_role("img", name="Loss of the runs").wait_for()
            table = page.get_by_role("region", name="Settings that differ")
            assert table.get_by_role("row", name="Learning rate").inner_text().split()[2:] == ["0.0001", "0.001"]
            page.get_by_role("img", name="Sample of high, step 60: a cat").wait_for()
            page.get_by_role("searchbox", name="Search runs to compare").fill("oth")
            page.get_by_role("checkbox", name="other").check()
            page.get_by_role("img", name="Sample of other, step 60: a cat").wait_for()
            page.get_by_role("checkbox", name="low").click()
            page.get_by_role("img", name="Sample of low, step 60: a cat").wait_for(state="detached")
            with page.expect_download() as download:
                page.get_by_test_id("download-all").click()
            assert download.value.suggested_filename == "low.zip"
            with zipfile.ZipFile(download.value.path()) as archive:
                assert archive.testzip() is None and len(archive.namelist()) == 4
        path = (low / "low-step000020.safetensors").resolve()
        whole = path.read_bytes()
        request = urllib.request.Request(
            f"{server.url}/gradio_api/file={path}", headers={**server.headers, "Range": "bytes=1000-1999"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:  # an interrupted download continues
            assert reply.status == 206 and reply.read() == whole[1000:2000]
        for name in ("gone.zip", "..%2Flow.zip", "low", "low%2F..%2Flow.zip", "%00.zip", "high.zip"):
            assert server.get(f"/downloads/{name}")[0] == 404, name
        assert server.get("/downloads/low.zip", Host="evil.example")[0] == 403
