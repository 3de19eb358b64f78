"""Fixtures of the tests on a real Slurm."""

from slurm_helpers import cluster, slurm
