"""Stops the pod of RunPod that this process runs on, with the key that RunPod gives to the pod itself.

A stopped pod keeps its disk and costs no GPU; nothing here deletes anything. `python -m launch serve` calls it when a run is
finished or hopeless; `python -m launch stop-pod` is the same by hand. The request is `POST /v2/pods/{id}/action
{"action": "stop"}` (docs.runpod.io, "Trigger a pod state transition"; 409: the pod is not running).
"""

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from launch.common import LaunchError, report
from launch.rent import Api, ApiError, address


@dataclass(frozen=True)
class Pod:
    """The pod that this process runs on. id: as RunPod names it."""

    id: str
    key: str


def own_pod(environ: Mapping[str, str] = os.environ) -> Pod | None:
    """The pod that this is, from the variables that RunPod sets; None elsewhere."""
    pod = environ.get("RUNPOD_POD_ID", "")
    if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", pod) and (key := environ.get("RUNPOD_API_KEY", "").strip()):
        return Pod(pod, key)
    return None


def stop(pod: Pod, patience_s: float = 300.0) -> str:
    """Stop the pod; a sentence that says so. RunPod then kills this process.

    Raises:
        LaunchError: RunPod refused, or did not answer within `patience_s`; the pod runs on and costs money.
    """
    try:
        Api(address(), pod.key, patience_s=patience_s).call("POST", f"/v2/pods/{pod.id}/action", {"action": "stop"})
    except ApiError as error:
        if error.status == 409:
            return f"pod {pod.id} is stopping already"
        raise LaunchError(f"pod {pod.id} is not stopped and still costs money: {error}") from error
    return f"pod {pod.id} stops; its disk is kept, and a start continues where it was"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments but --json."""


def run(args: argparse.Namespace) -> int:
    """Stop this machine. Raises LaunchError."""
    pod = own_pod()
    if pod is None:
        raise LaunchError("this is no pod of RunPod: RUNPOD_POD_ID and RUNPOD_API_KEY are not set")
    return report(args, stop(pod), {"id": pod.id, "stopped": True})
