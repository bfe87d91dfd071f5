"""Change one thing in a random spec. Most of the results are invalid."""

from __future__ import annotations

import json
import random
from typing import Any


def mutated(text: str, seed: int) -> str:
    """Return the spec with one number, word or name replaced."""
    chance = random.Random(seed)
    spec = json.loads(text)
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            if isinstance(node[key], dict | list):
                visit(node[key])
            places.append((node, key))

    visit(spec["model"])
    holder, key = chance.choice(places)
    names = [name for node, name in places if isinstance(node, dict)]
    holder[key] = chance.choice([0, 1, 2, 3, 5, -1, 1.5, "input", "silu", None, True, [], {}, chance.choice(names)])
    return json.dumps(spec) + "\n"
