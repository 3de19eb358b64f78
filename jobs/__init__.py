"""Runs that wait for the machine: the queue, and the process that starts the next one. Above the monitor, which knows of none."""
