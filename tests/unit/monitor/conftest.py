"""A run whose training is made by hand."""

from monitor_evidence import make_loop, trained
