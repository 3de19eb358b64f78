"""Fixtures of the campaigns."""

from monitor_helpers import folder
from musubi_helpers import toy_z
from runs_helpers import data
from short_run_helpers import one_cpu
from slurm_helpers import cluster, slurm
from world_trainings import model, work
