"""The built-in LoRA trainer: models of diffusers with peft and accelerate, and with the flag names of sd-scripts.

Why a second trainer beside sd-scripts: it needs no checkout and no second virtual environment, it resumes exactly, and
it writes its progress for the monitor. `python -m trainer ARGS` is its entry point. This file imports nothing, because
start-up time is part of the recovery time.
"""
