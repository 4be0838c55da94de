"""Autograd pieces that know no process group."""
