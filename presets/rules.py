"""Platform rules: a pure function of (platform, settings), so that all three platforms are tested on Linux.

The table (platforms.toml) lists what hangs on a platform; `platform_rules` applies it to the requested settings.
"""

from presets.tables import _table


def loader_settings(workers: int, persistent: bool = True) -> dict:
    """Data-loader settings for `platform_rules`; with 0 workers, without the settings that need workers."""
    return {
        "workers": workers,
        "persistent_workers": persistent and workers > 0,
        "prefetch_factor": 2 if workers > 0 else None,
        "start_method": None,
        "env": {},
    }


def platform_rules(platform: str, settings: dict) -> dict:
    """The settings without what hangs on a platform.

    Args:
        platform: a value of `sys.platform`; its prefix decides (`linux2`, `win32`, `darwin`).
        settings: workers, persistent_workers, prefetch_factor, start_method (None: the platform's default), env. Not modified.

    Returns:
        A new dict with the same keys. With zero workers there are no persistent workers and no prefetch factor, because
        torch refuses them.
    """
    tables = _table("platforms.toml")
    rules: dict = next((table for name, table in tables.items() if platform.startswith(name)), {})
    out = {**settings, "env": {**settings.get("env", {}), **rules.get("env", {})}}
    for key, value in rules.get("loader", {}).items():
        out[key] = None if value == "none" else value
    if not out.get("workers"):
        out.update(persistent_workers=False, prefetch_factor=None)
    return out
