"""What to train with: VRAM tiers, base models, defaults and platform rules, as TOML tables and pure functions.

Tables, not code, because people tune them and a user adds models without touching Python. Imports nothing of ours and,
until `lint`, `schema` or `estimate` is asked for, nothing but the standard library: the monitor and the page load it.
"""

from presets.rules import loader_settings, platform_rules
from presets.tables import ROOT, PresetError, data_root, defaults, families, find_model, models, tiers

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
    "tiers",
]
