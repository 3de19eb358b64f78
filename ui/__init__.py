"""The page: three steps that create a run, and a tab that shows all runs. `app.py` is the entry point.

The page keeps no state of its own. Form values are in a draft folder and a run's progress is in the run's folder, so
closing the tab or killing the server loses nothing. Never imports torch.
"""
