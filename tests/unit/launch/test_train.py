"""`launch train` on a machine that the run was not made on."""

from launch_helpers import a_run, arguments

import runs
from launch import train


def test_prepare_writes_the_script_for_this_machine_and_fetches_the_model(data, clean, monkeypatch):
    fetched = []
    monkeypatch.setattr(runs, "fetch_model", fetched.append)
    for choice in (("sdxl", "sd-scripts", "12G"), ("flux-dev", "diffusers", "20G")):
        folder = a_run(data, name=choice[0], model=choice[0], backend=choice[1], tier=choice[2])
        for file in (folder / "train.sh", folder / "job.json"):
            file.write_text(file.read_text().replace(str(data), "/another/machine"))
        assert train.run(arguments(train, "--prepare", run=folder.name)) == 0
        assert str(folder) in (folder / "train.sh").read_text()
    assert fetched == ["sdxl"], "the built-in trainer fetches its own"
    for file in (folder / "run.toml", folder / "job.json"):
        file.write_text(file.read_text().replace('"flux-dev"', '"of-their-models-toml"'))
    assert train.run(arguments(train, "--prepare", run=folder.name)) == 0
