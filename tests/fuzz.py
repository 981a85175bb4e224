"""Budget of the fuzz tests: by default a fixed, small set of cases; H3_FUZZ_CASES=20000 runs so many new ones per test instead."""

import os

from hypothesis import HealthCheck, settings

CASES = int(os.environ.get("H3_FUZZ_CASES", "0"))


def budget(cases):
    """Settings of one fuzz test that runs ``cases`` cases, the same every time, unless H3_FUZZ_CASES asks for more."""
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=CASES or cases, derandomize=not CASES, deadline=None, database=None, suppress_health_check=checks, print_blob=True
    )
