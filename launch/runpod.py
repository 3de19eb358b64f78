"""`python -m launch runpod RUN`: a pod of RunPod with the image and a volume, which trains the run and then stops itself.

The file is the body of `POST /v2/pods` of RunPod's REST API v2 (docs.runpod.io/api-reference-v2; v1 ended on 2026-11-15). Only
/workspace survives a stop, so all data is there; only a network volume survives the pod. A secret is a reference that RunPod
fills in: `{{ RUNPOD_SECRET_NAME }}` (console, Secrets). One request asks for one kind of GPU, so --submit tries the GPUs of the
run's tier one after the other, as that page describes: 400 and 403 mean the next one, 402 the end. The pod's name ends in
characters that no other has: where the answer to the request is lost, `GET /v2/pods` says by the name whether there is a pod.
"""

import argparse
from typing import TYPE_CHECKING, Any

import runs
from launch import common, gpus, travel
from launch.cloud_api import Api, ApiError, entries, key_of, rent
from launch.common import LaunchError
from launch.pods import address

if TYPE_CHECKING:
    from runs.spec import RunSpec

FILE = "runpod.json"
VOLUME = "/workspace"
CONTAINER_DISK_GB = 30
KEY = "RUNPOD_API_KEY"
KEYS = "https://console.runpod.io/user/settings"
HOSTS = "*.proxy.runpod.net"


def secret(name: str) -> str:
    """A reference to a secret of the account (docs.runpod.io/pods/templates/secrets)."""
    return f"{{{{ RUNPOD_SECRET_{name} }}}}"


def body(spec: "RunSpec", args: argparse.Namespace, gpu: str) -> dict[str, Any]:
    """The request that creates the pod. Raises LaunchError: no store."""
    names = ["HANGPROOF_AUTH", *travel.secrets(spec, args)]
    variables = {
        "HANGPROOF_DATA": f"{VOLUME}/hangproof",
        "HF_HOME": f"{VOLUME}/cache",
        "HANGPROOF_START_RUN": spec.slug,
        "HANGPROOF_START_STORE": travel.address(spec),
        "HANGPROOF_STOP_POD": args.stop,
        "HANGPROOF_ALLOWED_HOSTS": HOSTS,
        **travel.variables(spec, args),
        **{name: secret(name) for name in names},
    }
    if args.volume:
        mounts: dict[str, Any] = {"network": [{"volumeId": args.volume, "path": VOLUME}]}
    else:
        mounts = {"persistent": {"size": max(10, args.disk), "path": VOLUME}}
    found: dict[str, Any] = {
        "name": travel.name_there(spec),
        "image": args.image,
        "cloud": "COMMUNITY" if args.community else "SECURE",
        "gpu": {"id": gpu, "count": spec.gpus, "minCudaVersion": travel.CUDA},
        "disk": CONTAINER_DISK_GB,
        "mounts": mounts,
        "ports": ["7860/http"],
        "env": {name: value for name, value in variables.items() if value},
    }
    return found | ({"dataCenterIds": [args.data_center]} if args.data_center else {})


def create(api: Api, spec: "RunSpec", args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """The pod, on the first GPU that RunPod has.

    Raises:
        LaunchError: it has none, the balance is too low, or the request is wrong.
    """
    refused, own = None, travel.unique_name(spec)

    def find() -> dict[str, Any] | None:
        return next((pod for pod in entries(api.call("GET", "/v2/pods")) if pod.get("name") == own), None)

    for name in names:
        try:
            return rent(api, "POST", "/v2/pods", {**body(spec, args, name), "name": own}, own, find)
        except ApiError as error:
            if error.status not in (400, 403):
                raise
            refused = error
    raise LaunchError(
        f"RunPod has none of these GPUs now: {', '.join(names)}. Try again later, or name another with --gpu ({refused})"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN and options."""
    common.add_run(parser)
    travel.add_arguments(parser)
    travel.add_image(parser)
    parser.add_argument(
        "--volume", default="", metavar="ID", help="a network volume; without it, a disk that only this pod has"
    )
    parser.add_argument(
        "--data-center", default="", metavar="ID", help="where the pod is to be, such as that of the volume"
    )
    parser.add_argument("--community", action="store_true", help="community cloud: cheaper, without network volumes")


def run(args: argparse.Namespace) -> int:
    """Write runpod.json; with --submit, copy the run into its store and create the pod."""
    folder = common.find(args)
    spec = runs.load(folder)
    travel.one_machine(spec, "RunPod")
    names = gpus.names(spec, "runpod", args.gpu)
    if not names:
        raise LaunchError(f"{spec.model} trains on a CPU; rent a GPU for it with --gpu NAME, or train it here")
    if args.community and args.volume:
        raise LaunchError("--volume: network volumes are in the secure cloud only; leave out --community")
    path = travel.write(folder / FILE, travel.to_json(body(spec, args, names[0])))
    answer: dict[str, Any] = {}
    if args.submit:
        api = Api("RunPod", address("runpod"), key_of(KEY, KEYS))
        print(travel.upload(folder, travel.address(spec)))
        answer = create(api, spec, args, names)
    pod = str(answer.get("id", ""))
    secrets = ["HANGPROOF_AUTH", *travel.secrets(spec, args)]
    if pod:
        said = f"pod {pod}: {answer.get('cost', '?')} USD an hour (price_per_hour of a spend limit); its page: https://{pod}-7860.proxy.runpod.net"
    else:
        said = f"{path}\nMake these secrets in RunPod's console first: {', '.join(secrets)}"
    value = {"file": str(path), "secrets": secrets, "gpus": names, "submitted": args.submit, "pod": pod or None}
    return common.report(args, said, value)
