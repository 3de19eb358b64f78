"""Platform rules: a pure function of (platform, settings), so that all three are tested from Linux.

The table (platforms.toml) says what a platform cannot do without hanging; this only lays it over what was asked.
"""

from presets.tables import _table


def loader_settings(workers: int, persistent: bool = True) -> dict:
    """Settings of a data loader as `platform_rules` takes them; 0 workers drop what only workers can have."""
    return {
        "workers": workers,
        "persistent_workers": persistent and workers > 0,
        "prefetch_factor": 2 if workers > 0 else None,
        "start_method": None,
        "env": {},
    }


def platform_rules(platform: str, settings: dict) -> dict:
    """Settings that do not hang on a platform.

    Args:
        platform: as `sys.platform` writes it; only its beginning counts (`linux2`, `win32`, `darwin`).
        settings: workers, persistent_workers, prefetch_factor, start_method (None: the platform's own), env. Left as is.

    Returns:
        A new dict with the same keys. Zero workers never keep persistent workers or a prefetch factor: torch refuses them.
    """
    rules = next((table for name, table in _table("platforms.toml").items() if platform.startswith(name)), {})
    out = {**settings, "env": {**settings.get("env", {}), **rules.get("env", {})}}
    for key, value in rules.get("loader", {}).items():
        out[key] = None if value == "none" else value
    if not out.get("workers"):
        out.update(persistent_workers=False, prefetch_factor=None)
    return out
