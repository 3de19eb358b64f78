"""The check points of a starting rank, in one table, and the environment that the rank report shows.

Decision: twelve points with fixed numbers for all three trainers, although these pass them in different orders: a
report is read across trainers and across ranks. The heartbeat stores when each one was first reached, how long was
spent in it, and which one was reached last, so "stuck at" is the last one, whatever its number.

The environment is part of the record because it is the process's own: a launcher may change it after the monitor
started the script. The limits of guards/limits.toml are among it, because the monitor's own must enclose them. Values
that may be secrets are replaced before they are stored.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from guards.reading import json_object

CHECK_POINTS: dict[str, str] = {
    "arguments": "imports and arguments",
    "folders": "folders",
    "tokenizer": "tokenizers and text encoders",
    "model": "base model",
    "network": "LoRA network",
    "data": "data set and caches",
    "accelerator": "device and process group",
    "tracker": "experiment tracker",
    "loader": "data loader and optimizer",
    "ready": "last preparations",
    "first_step": "first step",
    "finished": "end of training",
}
"""Name -> what the rank does from there on. The number of a check point is its position, from 1."""
NAMES = tuple(CHECK_POINTS)
PASSES_ALL = ("first_step", "finished")
"""A rank that reaches one of these has passed all before it, used or not (a run without a tracker)."""

SHOWN = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|(CUDA|HIP|ROCR)_VISIBLE_DEVICES"
    r"|(TORCH_)?NCCL_\w+|GLOO_\w+|TP_SOCKET_IFNAME|WANDB_\w+|HF_HUB_OFFLINE|OMP_NUM_THREADS|HANGPROOF_\w+_S)"
)
HIDDEN = "(set, hidden)"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|IDENTITY|HEADER", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"://[^/\s]*@|[A-Za-z0-9+_=-]{32,}")  # a password in an address; a long key without "/"
VALUE_CHARACTERS = 200


def number(name: str) -> int:
    """The number of a check point, from 1. ValueError for another name."""
    return NAMES.index(name) + 1


def environment() -> dict[str, str]:
    """The variables of SHOWN that are set, without secrets; long values are cut."""
    found = {name: os.environ[name] for name in sorted(os.environ) if SHOWN.fullmatch(name)}
    for name, value in found.items():
        secret = value and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))
        found[name] = HIDDEN if secret else value[:VALUE_CHARACTERS]
    return found


def host() -> str:
    """The name of this machine."""
    return os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "")


def about(device: str, backend: str, most_bytes: int) -> bytes:
    """What the record says about the process, as JSON: host, device, backend, environment; the variables that fit."""
    facts = {"host": host(), "device": device, "backend": backend}
    variables = environment()
    while True:
        text = json.dumps({**facts, "environment": variables}, ensure_ascii=False).encode("utf-8", "replace")
        if len(text) <= most_bytes or not variables:
            return text[:most_bytes]
        variables.pop(next(reversed(variables)))


def read_about(text: str) -> dict[str, Any]:
    """What `about` wrote: "host", "device", "backend", "environment"; {} when there is nothing readable."""
    return json_object(text) or {}
