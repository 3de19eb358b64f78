"""Guards inside a training process: limits, deadlines, heartbeats, guarded files, a certain exit.

They run in the trainer's own interpreter (for sd-scripts a second environment): Python 3.10+ and the standard library;
numpy and torch are imported only where a function needs them.
"""
