"""Search for schedules within a memory limit: starts from the families and list scheduling, then tabu search."""

from pipeloom.solver.engine import Progress
from pipeloom.solver.search import SearchResult, search

__all__ = ["Progress", "SearchResult", "search"]
