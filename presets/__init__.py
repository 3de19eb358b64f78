"""What to train with: VRAM tiers, base models, defaults and platform rules, as TOML tables and pure functions.

Tables instead of code, because people tune them and users add models without Python. This package imports nothing else of
the project, and only the standard library until `lint`, `schema` or `estimate` is imported: the monitor and the page load it.
"""

from presets.rules import loader_settings, platform_rules
from presets.tables import ROOT, PresetError, data_root, defaults, families, find_model, models, sanity, tiers

__all__ = [
    "ROOT",
    "PresetError",
    "data_root",
    "defaults",
    "families",
    "find_model",
    "loader_settings",
    "models",
    "platform_rules",
    "sanity",
    "tiers",
]
