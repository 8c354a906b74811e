"""Unfinished runs of all studies in one order, on all GPUs of a machine, for as long as there is time."""
