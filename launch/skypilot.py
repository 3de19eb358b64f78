"""`python -m launch skypilot RUN` and `vast RUN`: a managed job of SkyPilot, which finds a spot machine with your GPU.

SkyPilot brings the machine back after a pre-emption, and starts the job again when it exits with code 5 (pre-empted, or
the GPU is gone) or, on several machines, 6 (one has ended its part). It does not restart it on 1, 3 or 4. The program
restores itself: the job first fetches the run from its store, and the monitor copies to it all the time. SkyPilot's
MOUNT_CACHED is not used: it begins an upload when a file is closed, in no particular order, so that a pre-emption
leaves states without their guard file (docs.skypilot.co, "Cloud object stores").

The format is that of SkyPilot 0.14.1 (sky/utils/schemas.py, sky/jobs/recovery_strategy.py): accelerators as a table
mean any of them; `job_recovery` takes strategy, max_restarts_on_errors and recover_on_exit_codes; a secret without a
value is filled in by `sky jobs launch --secret NAME` from the environment.
"""

import argparse
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import runs
from launch import common, travel
from launch.common import LaunchError, fill
from monitor.state import EXIT_AGAIN, EXIT_PREEMPTED
from runs.paths import CHECKOUTS, ROOT
from runs.quoting import quote
from runs.spec import RunSpec

FILE = "skypilot.yaml"
STRATEGY = "EAGER_NEXT_REGION"  # SkyPilot's default: tries another region at once
CPUS = "4+"  # for a model that needs no GPU
HEAD = """# Trains {name} on a spot machine. Written by `python -m launch skypilot`; submit it with --submit, or with
# sky jobs launch {secrets}{path}
"""
# ROOT and DATA there: where SkyPilot puts the project, and in an image of the Dockerfile. Both are for the shell.
HOME, IMAGE = ('"$HOME/sky_workdir"', '"$HOME/hangproof-data"'), ("/hangproof", "/data")


def document(spec: RunSpec, args: argparse.Namespace) -> dict[str, Any]:
    """The YAML file as a dict. Raises LaunchError: no store, no GPU."""
    store, names = travel.address(spec), travel.gpu_names(spec, args)
    compute: dict[str, Any] = {"accelerators": dict.fromkeys(names, spec.gpus)} if names else {"cpus": CPUS}
    codes = [EXIT_PREEMPTED, *[EXIT_AGAIN] * (spec.nodes > 1)]
    recovery = {"strategy": STRATEGY, "max_restarts_on_errors": 0, "recover_on_exit_codes": codes}
    resources = {**({"infra": args.infra} if args.infra else {}), **compute, "use_spot": not args.on_demand}
    resources |= {"disk_size": args.disk, "job_recovery": recovery}
    if args.image:
        resources["image_id"] = f"docker:{args.image}"
    found: dict[str, Any] = {"name": travel.name_there(spec), "resources": resources, "num_nodes": spec.nodes}
    found |= {} if args.image else {"workdir": str(ROOT)}  # SkyPilot leaves out what .gitignore names
    named = {"envs": travel.variables(spec), "secrets": dict.fromkeys(travel.secrets(spec, args))}
    found |= {key: values for key, values in named.items() if values}
    return {**found, **scripts(spec, store, bool(args.image))}


def scripts(spec: RunSpec, store: str, image: bool) -> dict[str, str]:
    """The set-up commands: the environments, unless the image has them, and the base model; and those that train.

    SkyPilot's own images have Python 3.10; Hangproof needs 3.11. uv is a wheel and fetches an interpreter without root.
    All nodes restore what the store has: one may have written more, which the others do not see.
    """
    root, data = IMAGE if image else HOME
    words = {"trainer": spec.backend, "model": spec.model, "name": spec.slug, "store": store}
    write = partial(fill, "skypilot.sh", root=root, data=data, **{key: quote(v) for key, v in words.items()})
    parts = {"environment": not image, "trainer": not image and spec.backend in CHECKOUTS}
    parts["model"] = travel.fetches_files(spec)
    run = write("nodes", "run") if spec.nodes > 1 else write("run")
    return {"setup": write(*(name for name, wanted in parts.items() if wanted)), "run": run}


def program() -> str:
    """The program `sky`: of the environment $SKYPILOT_VENV, else on PATH. Raises LaunchError: it is not installed."""
    venv = os.environ.get("SKYPILOT_VENV", "")
    found = shutil.which("sky", path=str(Path(venv) / "bin")) if venv else shutil.which("sky")
    if found is None:
        pip = "pip install 'skypilot[aws,gcp,runpod,vast]==0.14.1'"
        then = "put its `sky` on PATH or set SKYPILOT_VENV to that environment"
        raise LaunchError(f"SkyPilot is not installed; install it into an environment of its own ({pip}), and {then}")
    return found


def submit(path: Path, name: str, secrets: list[str]) -> None:
    """Copy the run into its store, and start the managed job with SkyPilot's own program. Raises LaunchError."""
    words = [program(), "jobs", "launch", "--yes", "--detach-run", "--name", name]
    env = travel.environment(path.parent, secrets)  # what is missing is reported before a long copy
    print(travel.upload(path.parent))
    words += [word for secret in secrets for word in ("--secret", secret)]
    if subprocess.run([*words, str(path)], env=env, check=False).returncode:
        raise LaunchError("SkyPilot did not accept the job; see its message above")


OPTIONS = (
    common.RUN,
    ("--infra CLOUD", "", "cloud and region as SkyPilot names them, such as aws/us-east-1; default: your cheapest"),
    *travel.RENTED,
    ("--image NAME", "", "image of the Dockerfile, built with USER_ID=0; without it, the job sets itself up"),
    ("--on-demand", False, "use machines that cost more and that nobody takes away"),
)


def run(args: argparse.Namespace) -> int:
    """Write skypilot.yaml; with --submit, copy the run into its store and start the job. `vast`: on Vast.ai."""
    if args.command == "vast":
        args.infra = args.infra or "vast"
    folder = runs.run_folder(args.run)
    spec = runs.load(folder)
    if args.infra.partition("/")[0] == "vast":
        travel.one_machine(spec, "Vast.ai")
    path, secrets, name = folder / FILE, travel.secrets(spec, args), travel.name_there(spec)
    named = "".join(f"--secret {name} " for name in secrets)
    head = HEAD.format(name=spec.slug, secrets=named, path=quote(str(path)))
    travel.write_yaml(path, head, document(spec, args))
    said = str(path)
    if args.submit:
        submit(path, name, secrets)
        said = f"submitted {path}. `sky jobs queue` shows it, `sky jobs cancel -n {name}` ends it"
    return common.report(args, said, {"file": str(path), "secrets": secrets, "submitted": args.submit})
