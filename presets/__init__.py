"""What to train with: VRAM tiers, families, base models, defaults and platform rules, as tables and pure functions.

Tables instead of code, because people tune them and users add models without Python. This package imports nothing else
of the project, and only the standard library until `lint` or `schema` is imported: the monitor and the page load it.
"""

from presets.tables import (
    PresetError,
    backend_of,
    backends,
    backends_of,
    data_root,
    defaults,
    families,
    find_model,
    models,
    read_table,
    smallest_tier,
    tier_flags,
    tiers,
    tiers_of,
    trainer_of,
)
