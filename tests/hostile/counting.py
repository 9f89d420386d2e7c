"""How many inputs each hostile test generated, and how many it should generate.

HEADWISE_EXAMPLES  examples of each hypothesis test: a number, or "large" for fifteen times the default (default: the
                   number in the test)
HEADWISE_COUNTS    a file to which {"test": …, "inputs": …} is appended for each test when the process ends
"""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter

from hypothesis import HealthCheck, settings

COUNTS: Counter[str] = Counter()


def count(test_name: str, n: int = 1) -> None:
    """`test_name` has tried `n` more inputs."""
    COUNTS[test_name] += n


def hostile(default: int) -> settings:
    """Settings of a hypothesis test with `default` examples, or as many as HEADWISE_EXAMPLES asks for."""
    wanted = os.environ.get("HEADWISE_EXAMPLES", "")
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    examples = {"": default, "large": 15 * default}.get(wanted) or int(wanted)
    return settings(max_examples=examples, suppress_health_check=slow)


@atexit.register
def _append() -> None:
    file = os.environ.get("HEADWISE_COUNTS")
    if file and COUNTS:
        with open(file, "a", encoding="utf-8") as lines:
            lines.writelines(json.dumps({"test": test, "inputs": n}) + "\n" for test, n in COUNTS.items())
