"""Adversarial examples: 300 in every run, 20,000 with `pytest --hypothesis-profile=nightly tests/reliability`."""

from hypothesis import HealthCheck, settings

common = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("nightly", max_examples=20_000, **common)
# Every run of the ordinary tests sees the same examples; new ones are for the night.
settings.register_profile("daily", max_examples=300, derandomize=True, **common)
