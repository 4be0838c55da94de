"""Search for schedules within a memory limit: warm starts, annealing of one period, tabu search, and proofs."""

from pipeloom.solver.cuts import CutResult, search_cuts
from pipeloom.solver.incumbent import Progress
from pipeloom.solver.search import SearchResult, search

__all__ = ["CutResult", "Progress", "SearchResult", "search", "search_cuts"]
