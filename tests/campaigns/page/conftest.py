"""Fixtures of the page's long journeys."""

from ui_helpers import runs_data as data
