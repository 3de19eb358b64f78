"""Where a run goes: this machine, Slurm, SkyPilot, a container, a rented pod; and its durable store.

Decision: Hangproof writes the file that an engine takes (an sbatch script, a YAML file, an image) and submits it with
that engine's own program. It schedules nothing and moves no bytes by itself.
"""
