"""What protects inside a training process: deadlines, heartbeats, guarded files, a certain exit.

Runs in the trainer's own interpreter (for sd-scripts a second environment), so it uses Python 3.10+ and the standard
library, with numpy and torch imported only where a function needs them.
"""
