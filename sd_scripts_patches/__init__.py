"""Guards put into kohya's sd-scripts while its modules are imported; not one file of the checkout is edited.

Why import hooks rather than a fork or a diff: a diff binds by line and breaks with the next release, a fork has to
be rebased for ever. A hook binds by name, can say beforehand whether it will fit, and refuses to run when it does
not. `python -m sd_scripts_patches check DIR` asks; `python -m sd_scripts_patches SCRIPT ARGS` runs.
"""
