"""Periodic schedules: modulo scheduling, annealing of one period, and unrolling it to all micro-batches."""
