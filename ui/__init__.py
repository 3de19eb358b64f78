"""The page: three steps to a run, and the runs themselves. `app.py` is its door.

It holds no state that matters. What a person types lies in a draft folder, what a run does lies in the run's folder;
every view is read from there, so that a closed tab or a killed server costs nothing. Never imports torch.
"""
