"""The embedded LoRA trainer: FLUX.1 on diffusers, peft and accelerate, speaking sd-scripts' flag names.

Why a second trainer beside sd-scripts: it needs no checkout and no second environment, its resume is exact, and it
writes its progress where the monitor reads it. `python -m trainer ARGS` is its door; nothing is imported here, because
start-up time is part of the recovery time.
"""
