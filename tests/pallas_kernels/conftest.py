"""Threads for Pallas's GPU interpreter, and products traced anew in each test."""

import os

import pytest

# The interpreter calls back from inside a computation: on one core XLA's one thread would wait for itself.
cores = (
    len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
)
if cores == 1:
    os.environ.setdefault(
        "NPROC", "4"
    )  # threads of XLA's pool, read when the backend starts


@pytest.fixture(autouse=True)
def _fresh_products(fresh_products):
    """Many of these tests replace an implementation, or count how often one is traced."""
