"""Search for schedules within a memory limit: families and list scheduling, one period annealed, tabu search."""

from pipeloom.solver.incumbent import Progress
from pipeloom.solver.search import SearchResult, search

__all__ = ["Progress", "SearchResult", "search"]
