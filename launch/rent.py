"""`python -m launch runpod RUN`: a pod of RunPod with the image and a volume, which trains the run, then stops itself.

`stop-pod` is the same by hand, with the key that RunPod gives the pod. A stopped pod keeps its disk and costs no GPU.

The file is the body of `POST /v2/pods` of RunPod's REST API v2 (docs.runpod.io/api-reference-v2; v1 ended on
2026-11-15). Only /workspace survives a stop, so all data is there; only a network volume survives the pod. A secret is
a reference that RunPod fills in: `{{ RUNPOD_SECRET_NAME }}` (console, Secrets). One request asks for one kind of GPU;
--submit tries those of --gpu one after the other, as that page describes: 400 and 403 mean the next one, 402 the end.

Exactly one pod is rented, whatever becomes of the answer: its name ends in characters that no other has, and where the
answer is lost, `GET /v2/pods` says by the name whether there is a pod. No request is repeated blindly. The key never
appears in a URL, a log or an error, and a redirect is not followed with it.
"""

import argparse
import json
import os
import re
import time
import urllib.parse
from collections.abc import Mapping
from secrets import token_hex
from typing import Any

import runs
from guards import deadline
from launch import common, travel
from launch.common import LaunchError
from runs.files import atomic_write
from runs.spec import RunSpec

URL, URL_VARIABLE = "https://api.runpod.io", "HANGPROOF_RUNPOD_URL"  # another address of the same API
FILE = "runpod.json"
VOLUME = "/workspace"
CONTAINER_DISK_GB = 30
KEY = "RUNPOD_API_KEY"
HOSTS = "*.proxy.runpod.net"
TIMEOUT_S = 30.0
LOOKS_COUNT, LOOK_S = 5, 3.0  # at the list of pods for one whose creation nobody confirmed


class ApiError(LaunchError):
    """RunPod refused. `status`: of HTTP. 0 (the answer was lost) and 500 or more: it may have done what was asked."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


def call(own_key: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON answer to one request; {} for an empty one. A proxy of the environment is used, but never for loopback.

    own_key: of the account or of one pod. Raises ApiError; LaunchError: the address is wrong, and nothing was sent.
    """
    import httpx

    url = os.environ.get(URL_VARIABLE, "").rstrip("/") or URL
    headers = {"Authorization": f"Bearer {own_key}", "Accept": "application/json", "User-Agent": "hangproof"}
    try:
        parts = urllib.parse.urlsplit(url)
        loopback = parts.hostname in travel.LOOPBACK
        if parts.scheme != "https" and not loopback:
            raise ValueError("the key is sent over https only")
        reply = deadline.call(
            httpx.request, method, url + path, json=body, headers=headers, timeout=TIMEOUT_S, follow_redirects=False,
            trust_env=not loopback, seconds=2 * TIMEOUT_S, what="the answer",
        )  # fmt: skip
    except (httpx.HTTPError, TimeoutError) as error:
        why = f"{method} {path}: {error or type(error).__name__}"
        raise ApiError(f"RunPod does not answer ({why}); check the network") from None
    except (ValueError, ImportError, httpx.InvalidURL) as error:  # of a proxy's variable, too
        raise LaunchError(f"{url}: {error}; fix the address, the key or the proxy, which variables set") from None
    if not reply.is_success:
        status, why = reply.status_code, " ".join(reply.text.replace(own_key or "\0", "…").split())[:500]
        what = {
            401: "RunPod does not accept the key; make a new one in its console",
            402: "RunPod: the balance of the account is too low; add credit in its console",
            403: f"RunPod: the key may not do this ({method} {path}); make one with write access",
            429: "RunPod: too many requests; try again in a minute",
        }.get(status, f"RunPod refused {method} {path}")
        raise ApiError(f"{what} (HTTP {status}{': ' + why if why else ''})", status)
    try:
        value = json.loads(reply.content or b"{}")
    except (ValueError, RecursionError):
        raise ApiError("the answer is not JSON; a proxy may stand in between") from None
    return value if isinstance(value, dict) else {"items": value}


def key() -> str:
    """The key of the account, from the environment. Raises LaunchError."""
    found = os.environ.get(KEY, "").strip()
    if not found:
        where = "https://console.runpod.io/user/settings"
        raise LaunchError(f"{KEY} is not set; make a key at {where} and set it in the environment, not in a file")
    if not re.fullmatch("[!-~]+", found):
        raise LaunchError(f"{KEY} is not a key: it contains spaces or other unusual characters")
    return found


def body(spec: RunSpec, args: argparse.Namespace, gpu: str) -> dict[str, Any]:
    """The request that creates the pod. Raises LaunchError: no store, or one that a pod cannot log in to."""
    if spec.store.startswith("sftp:"):
        raise LaunchError(f"{spec.slug}: a pod has no SSH key for its store; use hf://buckets/ME/runs or s3://…")
    names = ["HANGPROOF_AUTH", *travel.secrets(spec, args)]
    variables = {
        "HANGPROOF_DATA": f"{VOLUME}/hangproof",
        "HF_HOME": f"{VOLUME}/cache",
        "HANGPROOF_START_RUN": spec.slug,
        "HANGPROOF_START_STORE": travel.address(spec),
        "HANGPROOF_STOP_POD": args.stop,
        "HANGPROOF_ALLOWED_HOSTS": HOSTS,
        **travel.variables(spec),
        # references to secrets of the account (docs.runpod.io/pods/templates/secrets)
        **{name: f"{{{{ RUNPOD_SECRET_{name} }}}}" for name in names},
    }
    own, network = {"size": max(10, args.disk), "path": VOLUME}, [{"volumeId": args.volume, "path": VOLUME}]
    found: dict[str, Any] = {
        "name": travel.name_there(spec),
        "image": args.image,
        "cloud": "SECURE",
        "gpu": {"id": gpu, "count": spec.gpus, "minCudaVersion": travel.CUDA},
        "disk": CONTAINER_DISK_GB,
        "mounts": {"network": network} if args.volume else {"persistent": own},
        "ports": ["7860/http"],
        "env": {name: value for name, value in variables.items() if value},
    }
    return found | ({"dataCenterIds": [args.data_center]} if args.data_center else {})


def create(account: str, spec: RunSpec, args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """The pod, on the first GPU that RunPod has: exactly one, also where the answer is lost or is a proxy's error.

    Raises LaunchError: it has none, the balance is too low, the request is wrong, or nobody knows whether there is a
    pod; the message has its name then.
    """
    refused, own = None, f"{travel.name_there(spec, 50)}-{token_hex(4)}"  # no other pod has this name
    for name in names:
        try:
            pod = call(account, "POST", "/v2/pods", {**body(spec, args, name), "name": own})
            if pod.get("id") and isinstance(pod["id"], str):
                return pod
            raise ApiError("RunPod's answer names no pod")
        except ApiError as error:
            if not 0 < error.status < 500:
                return _find(account, own, error)
            if error.status not in (400, 403):
                raise
            refused = error
    raise LaunchError(f"RunPod has none of these GPUs now: {', '.join(names)}. Wait, or change --gpu ({refused})")


def _find(account: str, name: str, lost: ApiError) -> dict[str, Any]:
    """The pod of this name, which a request may have made before its answer was lost. LaunchError: it is not listed."""
    why = str(lost)
    for _ in range(LOOKS_COUNT):  # a new pod may be listed late
        time.sleep(LOOK_S)
        try:
            answer = call(account, "GET", "/v2/pods")
        except ApiError as error:
            why = f"{lost}; the list of pods cannot be read either ({error})"
            continue
        for pod in next((value for value in answer.values() if isinstance(value, list)), []):
            if isinstance(pod, dict) and pod.get("id") and pod.get("name") == name:
                return pod
    raise LaunchError(f"{why}. Look for the pod {name} in RunPod's console first: if it is there, it costs money")


def own_pod(environ: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """The id and the key of the pod that this process runs on, from the variables that RunPod sets; None elsewhere."""
    pod = environ.get("RUNPOD_POD_ID", "")
    if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", pod) and (found := environ.get(KEY, "").strip()):
        return pod, found
    return None


def stop(pod: str, own_key: str) -> str:
    """Stop the pod; a sentence that says so. RunPod then kills this process (docs.runpod.io, pod state transitions).

    Raises LaunchError: RunPod refused, or did not answer; the pod runs on and costs money.
    """
    try:
        call(own_key, "POST", f"/v2/pods/{pod}/action", {"action": "stop"})
    except LaunchError as error:
        if isinstance(error, ApiError) and error.status == 409:
            return f"pod {pod} is stopping already"
        raise LaunchError(f"pod {pod} is not stopped and still costs money: {error}") from error
    return f"pod {pod} stops; its disk is kept, and a start continues where it was"


OPTIONS = (
    common.RUN,
    *travel.RENTED,
    ("--image NAME", ..., "the Dockerfile's image (USER_ID=0), where a pod can pull it: docker.io/ME/hangproof:1"),
    ("--volume ID", "", "a network volume; without it, a disk that only this pod has"),
    ("--data-center ID", "", "where the pod is to be, such as that of the volume"),
    ("--stop", ("1", "always", ""), "after the run; half an hour after your stop (always: a minute); empty: never"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `runpod`; `stop-pod` has none."""
    if not parser.prog.endswith(" stop-pod"):
        common.add_options(parser, OPTIONS)


def run(args: argparse.Namespace) -> int:
    """Write runpod.json; with --submit, copy the run into its store and create the pod. Or stop the own pod."""
    if args.command == "stop-pod":
        if (pod := own_pod()) is None:
            raise LaunchError("this is no pod of RunPod: RUNPOD_POD_ID and RUNPOD_API_KEY are not set")
        return common.report(args, stop(*pod), {"id": pod[0], "stopped": True})
    folder = runs.run_folder(args.run)
    spec = runs.load(folder)
    travel.one_machine(spec, "RunPod")
    names = travel.gpu_names(spec, args)
    if not names:
        raise LaunchError(f"{spec.model} trains on a CPU; rent a GPU for it with --gpu NAME, or train it here")
    path = folder / FILE
    atomic_write(path, json.dumps(body(spec, args, names[0]), ensure_ascii=False, indent=2) + "\n")
    made, secrets = None, ["HANGPROOF_AUTH", *travel.secrets(spec, args)]
    about = "HANGPROOF_AUTH is USER:PASSWORD, the login of its page"
    said = f"{path}\nMake these secrets in RunPod's console first: {', '.join(secrets)} ({about})"
    if args.submit:
        account = key()
        print(said, travel.upload(folder), sep="\n")
        rented = create(account, spec, args, names)
        made, cost = rented["id"], f"costs {rented.get('cost', '?')} USD an hour"
        ends = "it stops itself after the run" if args.stop else "it costs that until you stop it"
        said = f"pod {made} {cost}; {ends}. Its page, in some minutes: https://{made}-7860.proxy.runpod.net"
    value = {"file": str(path), "secrets": secrets, "gpus": names, "submitted": args.submit, "pod": made}
    return common.report(args, said, value)
