"""Installs the guards into kohya's sd-scripts as its modules are imported. No file of the checkout is changed.

Why import hooks and not a fork or a diff: a diff binds to line numbers and breaks with the next release, and a fork
must be rebased on every one. A hook binds to names, its compatibility can be checked before a run, and the launcher
refuses to start when a name is missing.

`python -m sd_scripts_patches check DIR` checks a checkout. `python -m sd_scripts_patches SCRIPT ARGS` runs a script.
"""
