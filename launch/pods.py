"""Stops the rented machine that this process runs on: RunPod and Vast.ai, each with the key it gives to the machine itself.

A stopped pod keeps its disk and costs no GPU; nothing here deletes anything. `python -m launch serve` calls it when a run is
finished or hopeless; `python -m launch stop-pod` is the same by hand.

RunPod: `POST /v2/pods/{id}/action {"action": "stop"}` with the pod-scoped RUNPOD_API_KEY (docs.runpod.io, "Trigger a pod state
transition"; 409: the pod is not running). Vast: `PUT /api/v0/instances/{id}/ {"state": "stopped"}` with CONTAINER_API_KEY, which
can only start, stop or destroy that instance (docs.vast.ai, "manage instance" and "hello world").
"""

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from launch.cloud_api import Api, ApiError
from launch.common import LaunchError, report

RUNPOD_URL = "https://api.runpod.io"
VAST_URL = "https://console.vast.ai"
URL_VARIABLES = {"runpod": "HANGPROOF_RUNPOD_URL", "vast": "HANGPROOF_VAST_URL"}  # another address of the same API


@dataclass(frozen=True)
class Pod:
    """The machine that this process runs on. provider: "runpod" or "vast"; id: as the provider names it."""

    provider: str
    id: str
    key: str


def address(provider: str, environ: Mapping[str, str] = os.environ) -> str:
    """The address of a provider's API."""
    default = {"runpod": RUNPOD_URL, "vast": VAST_URL}[provider]
    return environ.get(URL_VARIABLES[provider], "").rstrip("/") or default


def own_pod(environ: Mapping[str, str] = os.environ) -> Pod | None:
    """The rented machine that this is, from the variables that the provider sets; None elsewhere."""
    runpod, vast = environ.get("RUNPOD_POD_ID", ""), environ.get("CONTAINER_ID", "")
    if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", runpod) and (key := environ.get("RUNPOD_API_KEY", "").strip()):
        return Pod("runpod", runpod, key)
    if re.fullmatch(r"[0-9]{1,20}", vast) and (key := environ.get("CONTAINER_API_KEY", "").strip()):
        return Pod("vast", vast, key)
    return None


def stop(pod: Pod, patience_s: float = 300.0) -> str:
    """Stop the pod; a sentence that says so. The provider then kills this process.

    Raises:
        LaunchError: the provider refused, or did not answer within `patience_s`; the pod runs on and costs money.
    """
    try:
        if pod.provider == "runpod":
            api = Api("RunPod", address("runpod"), pod.key, patience_s=patience_s)
            api.call("POST", f"/v2/pods/{pod.id}/action", {"action": "stop"})
        else:
            api = Api("Vast.ai", address("vast"), pod.key, patience_s=patience_s)
            answer = api.call("PUT", f"/api/v0/instances/{pod.id}/", {"state": "stopped"})
            if answer.get("success") is not True:
                raise ApiError(
                    f"Vast.ai did not stop the instance: {answer.get('msg') or answer.get('error') or answer}"
                )
    except ApiError as error:
        if pod.provider == "runpod" and error.status == 409:
            return f"pod {pod.id} is stopping already"
        raise LaunchError(f"pod {pod.id} is not stopped and still costs money: {error}") from error
    return f"pod {pod.id} stops; its disk is kept, and a start continues where it was"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments but --json."""


def run(args: argparse.Namespace) -> int:
    """Stop this machine. Raises LaunchError."""
    pod = own_pod()
    if pod is None:
        raise LaunchError(
            "this is no pod of RunPod or Vast.ai: RUNPOD_POD_ID and RUNPOD_API_KEY, or CONTAINER_ID and CONTAINER_API_KEY, are not set"
        )
    return report(args, stop(pod), {"provider": pod.provider, "id": pod.id, "stopped": True})
