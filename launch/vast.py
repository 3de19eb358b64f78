"""`python -m launch vast RUN`: the managed job of `launch skypilot`, on a machine of Vast.ai."""

import argparse

import runs
from launch import common, skypilot, travel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN and options."""
    skypilot.add_arguments(parser, infra="vast")


def run(args: argparse.Namespace) -> int:
    """As `launch skypilot`. Raises LaunchError also for a run of several machines, which SkyPilot does not start there."""
    travel.one_machine(runs.load(common.find(args)), "Vast.ai")
    return skypilot.run(args)
