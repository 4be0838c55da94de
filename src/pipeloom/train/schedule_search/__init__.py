"""`[schedule] name = "search"` in training: costs given, or measured in the first steps; one search; one schedule for all ranks.

request.py   a search before the first step, for given or estimated costs; rank 0 decides for all ranks
run.py       one search, and its outcome beside the family that it is compared with
measure.py   a search after the first steps, for the costs measured in them, and the trial of its outcome
trial.py     the searched schedule and the family in alternating steps
saved.py     `schedule.json` in the run's folder, and its reuse by a later run
"""

from pipeloom.train.schedule_search.measure import MeasureThenSearch
from pipeloom.train.schedule_search.request import estimated, resolve_before_start

__all__ = ["MeasureThenSearch", "estimated", "resolve_before_start"]
