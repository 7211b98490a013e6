"""Makes up texts by a grammar: rules in YAML, draws by one random generator, and names that are bound on the way.

The files are synthetic/*.yaml. A program is a mapping, followed from top to bottom, or a list of programs:

| entry | what it does |
|---|---|
| `name: TEXT` | binds a name; in a text `{name}` is what a name stands for, `<rule>` a draw from that list |
| `name: LIST`, `name: <rule>` | draws one of a list, uniformly |
| `one, two: <rule>` | draws without replacement |
| `who verb: <rule>` | draws a record, and names its fields |
| `name but a b: <rule>` | draws anything but what `a` and `b` stand for |
| `one of: [rule, PROGRAM, ...]` | follows one, uniformly |
| `chance: {0.7: PROGRAM, else: PROGRAM}` | follows the first with that probability |
| `by name: {VALUE: PROGRAM, ..., else: PROGRAM}` | follows the one for the name's value |

`{combine: LISTS}` is the list of all combinations, `{count: [FROM, TO, STEP]}` that of numbers, without TO. A draw
happens where it stands, so a seed makes the same texts everywhere. Why no library: pytracery draws from the generator
that all of a process share, and never without replacement.
"""

import random
import re
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any

import yaml

_MARK = re.compile(r"<(\w+)>|\{([\w ]+)\}")


@cache
def read_rules(file: str) -> dict[str, Any]:
    """Read synthetic/`file`.yaml, with combinations and counts written out; all share the result, so leave it as is."""
    text = (files("groupwise.data") / "synthetic" / f"{file}.yaml").read_text("utf-8")
    rules: dict[str, Any] = _written_out(yaml.safe_load(text))
    return rules


def _written_out(node: Any) -> Any:
    if isinstance(node, list):
        return [_written_out(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _written_out(value) for key, value in node.items()}
    if set(node) == {"combine"}:
        return [" ".join(words) for words in product(*node["combine"])]
    return [str(number) for number in range(*node["count"])] if set(node) == {"count"} else node


def follow(file: str, program: str, rng: random.Random, **names: Any) -> dict[str, Any]:
    """Follow a program of synthetic/`file`.yaml, beginning with `names`; what each name stands for at its end."""
    _Grammar(read_rules(file), rng, names).follow(program)
    return names


class _Grammar:
    def __init__(self, rules: dict[str, Any], rng: random.Random, names: dict[str, Any]) -> None:
        self.rules, self.rng, self.names = rules, rng, names

    def follow(self, program: Any) -> None:
        program = self.rules[program] if isinstance(program, str) else program
        for entries in program if isinstance(program, list) else [program]:
            for key, value in entries.items():
                if key == "one of":
                    self.follow(self.rng.choice(value))
                elif key == "chance":
                    (share, likely), (_, other) = value.items()
                    self.follow(likely if self.rng.random() < share else other)
                elif key.startswith("by "):
                    known = self.names[key.removeprefix("by ")]
                    self.follow(value[known if known in value else "else"])
                else:
                    self.bind(key, value)

    def bind(self, key: str, value: str | list[Any]) -> None:
        key, _, avoided = key.partition(" but ")
        places, but = key.split(", "), [self.names[name] for name in avoided.split()]
        if isinstance(value, str) and (mark := _MARK.fullmatch(value)) and mark[1]:
            value = self.rules[mark[1]]
        if isinstance(value, str):
            drawn = [value]
        else:
            options = [option for option in value if option not in but]
            drawn = self.rng.sample(options, len(places)) if len(places) > 1 else [self.rng.choice(options)]
        for place, item in zip(places, drawn, strict=True):
            fields = place.split()
            for name, text in zip(fields, item if len(fields) > 1 else [item], strict=True):
                self.names[name] = self.say(str(text))

    def say(self, text: str) -> str:
        """The text with its names and draws in place, from left to right."""
        return _MARK.sub(lambda m: self.say(self.rng.choice(self.rules[m[1]])) if m[1] else str(self.names[m[2]]), text)
