"""Endpoints of what can be trained: base models and VRAM tiers."""

from typing import Any

import presets


def list_models() -> list[dict[str, Any]]:
    """The base models: key, name, trainers, licence."""
    return [
        {"key": key, "name": one["name"], "trainers": one["backends"], "licence": one["licence"], "note": one["note"]}
        for key, one in presets.models().items()
    ]


def list_tiers() -> list[dict[str, Any]]:
    """The VRAM tiers."""
    return [{"key": key, **one} for key, one in presets.tiers().items()]
