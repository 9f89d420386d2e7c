"""How many inputs each hostile test generated, and how many it should generate.

HEADWISE_EXAMPLES  examples of each hypothesis test: a number, or "large" for 5000 (default: the number in the test)
HEADWISE_COUNTS    a file to which {"test": …, "inputs": …} is appended for each test when the process ends
"""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter

COUNTS: Counter[str] = Counter()


def count(test_name: str, n: int = 1) -> None:
    """`test_name` has tried `n` more inputs."""
    COUNTS[test_name] += n


def examples(default: int) -> int:
    """The number of examples for a hypothesis test."""
    wanted = os.environ.get("HEADWISE_EXAMPLES", "")
    return {"": default, "large": 5000}.get(wanted) or int(wanted)


@atexit.register
def _append() -> None:
    file = os.environ.get("HEADWISE_COUNTS")
    if file and COUNTS:
        with open(file, "a", encoding="utf-8") as lines:
            lines.writelines(json.dumps({"test": test, "inputs": n}) + "\n" for test, n in COUNTS.items())
