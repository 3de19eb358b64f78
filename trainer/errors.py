"""The one error that a user of the trainer is meant to read.

A TrainError is printed as one line, without a traceback, and ends the run with exit code 1; anything else is a bug and
keeps its traceback.
"""


class TrainError(Exception):
    """What is wrong, where, and what to do about it."""
