"""The error for everything that a user can fix.

A TrainError is printed as one line without a traceback, and the run exits with code 1. Any other exception is a bug and
keeps its traceback.
"""


class TrainError(Exception):
    """The message says what is wrong, where, and what to do."""
