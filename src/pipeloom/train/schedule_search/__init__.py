"""`[schedule] name = "search"` in training: costs given, or measured in the first steps; one search; one schedule for all ranks.

request.py   resolve the search before the start, or estimate it; rank 0 decides for all
run.py       one search, its outcome beside the family that it is compared with
measure.py   the first steps: measured, searched for, tried
trial.py     the searched schedule and the family, a step each in turn
saved.py     `schedule.json` in the run's folder, and what a later run takes over
"""

from pipeloom.train.schedule_search.measure import MeasureThenSearch
from pipeloom.train.schedule_search.request import estimated, resolve_before_start

__all__ = ["MeasureThenSearch", "estimated", "resolve_before_start"]
