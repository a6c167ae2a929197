"""How often a law is tried: in full where the slow tests run too, for a quarter of it in the quick
ones.
"""

from hypothesis import HealthCheck, settings


def examples(number: int, **others: object) -> settings:
    """Settings for `number` examples in `make test-all`; fixtures serve all examples of a test."""
    profile = settings()
    return settings(
        profile,
        max_examples=max(5, number * profile.max_examples // 100),
        suppress_health_check=[*profile.suppress_health_check, HealthCheck.function_scoped_fixture],
        **others,
    )
