"""Search for schedules within a memory limit: warm starts, annealing of one period, tabu search, and proofs."""

from pipeloom.solver.incumbent import Progress
from pipeloom.solver.search import SearchResult, search

__all__ = ["Progress", "SearchResult", "search"]
