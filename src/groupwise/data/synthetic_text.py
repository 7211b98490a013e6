"""Makes small synthetic data sets from templates and a seed: no file, no network, no licence.

The templates, synthetic/*.yaml, are grammars of rules and programs. A program binds names to texts that are drawn from
one random generator. It is a mapping, executed from top to bottom, or a list of programs:

| entry | what it does |
|---|---|
| `name: TEXT` | binds a name; in a text `{name}` is replaced by the name's value, `<rule>` by a draw from that list |
| `name: LIST`, `name: <rule>` | draws one of a list, uniformly |
| `one, two: <rule>` | draws without replacement |
| `who verb: <rule>` | draws a record, and names its fields |
| `name but a b: <rule>` | draws anything but the values of `a` and `b` |
| `one of: [rule, PROGRAM, ...]` | runs one of them, uniformly |
| `chance: {0.7: PROGRAM, else: PROGRAM}` | runs the first with that probability |
| `by name: {VALUE: PROGRAM, ..., else: PROGRAM}` | runs the one for the name's value |

`{combine: LISTS}` is the list of all combinations. Draws happen in the order of the file, so a seed gives the same
texts on every machine. pytracery is not used: it draws from the global generator of the process, and always with
replacement.
"""

import random
import re
from collections.abc import Callable
from functools import cache, partial
from importlib.resources import files
from itertools import product
from typing import Any

import yaml

from groupwise.data.glue import GLUE
from groupwise.data.text import instruct, linearise_mr, linearise_triples
from groupwise.data.text_examples import Labelled, LabelledText, PairedText, Request, Texts, sha256_of_examples

_MARK = re.compile(r"<(\w+)>|\{([\w ]+)\}")


@cache
def read_rules(file: str) -> dict[str, Any]:
    """Read synthetic/`file`.yaml, with combinations expanded; the result is shared: do not change it."""
    text = (files("groupwise.data") / "synthetic" / f"{file}.yaml").read_text("utf-8")
    return _written_out(yaml.safe_load(text))


def _written_out(node: Any) -> Any:
    if isinstance(node, list):
        return [_written_out(item) for item in node]
    if not isinstance(node, dict):
        return node
    if set(node) == {"combine"}:
        return [" ".join(words) for words in product(*node["combine"])]
    return {key: _written_out(value) for key, value in node.items()}


def follow(file: str, program: str, rng: random.Random, **names: Any) -> dict[str, Any]:
    """Run a program of synthetic/`file`.yaml, starting with `names`; returns all names with their values."""
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
            options = [option for option in value if option not in but] if but else value
            drawn = self.rng.sample(options, len(places)) if len(places) > 1 else [self.rng.choice(options)]
        for place, item in zip(places, drawn, strict=True):
            fields = place.split()
            for name, text in zip(fields, item if len(fields) > 1 else [item], strict=True):
                self.names[name] = self.say(str(text))

    def say(self, text: str) -> str:
        """The text with names and draws filled in, from left to right."""
        return _MARK.sub(lambda m: self.say(self.rng.choice(self.rules[m[1]])) if m[1] else str(self.names[m[2]]), text)


def make_review(rng: random.Random, label: int) -> Texts:
    """SST-2: a sentence about a film, negative (0) or positive (1); of two clauses, the main clause decides."""
    return follow("reviews", "review", rng, label=label)["text"], None


def make_pair(rng: random.Random, label: int, task: str) -> Texts:
    """QNLI, QQP and MNLI: two sentences about films that agree or not; "neutral": one of them about a restaurant."""
    first = rng.randrange(2)
    meaning = GLUE[task].classes[label]
    if meaning == "neutral":
        second = rng.choice(make_restaurant(rng).references)
    else:
        alike = meaning in ("entailment", "duplicate")
        second = make_review(rng, first if alike else 1 - first)[0]
    return make_review(rng, first)[0], second


def make_restaurant(rng: random.Random) -> Request:
    """E2E: a name and at least two more slots, linearised, and four references with the same facts."""
    rules = read_rules("restaurants")
    slots: dict[str, str] = {}
    while len(slots) < 2:
        slots = {slot: rng.choice(values) for slot, (share, values) in rules["slots"].items() if rng.random() < share}
    slots = {"name": rng.choice(rules["names"])} | slots
    references = []
    for frame in rng.sample(range(4), 4):
        names = follow("restaurants", "description", rng, **dict.fromkeys(rules["slots"], "") | slots, frame=frame)
        extras = [names[extra] for extra in ("rating", "family") if names[extra]]
        rng.shuffle(extras)
        references.append(" ".join([names["text"], *extras]))
    return Request(linearise_mr(", ".join(f"{slot}[{value}]" for slot, value in slots.items())), tuple(references))


def make_triples_and_texts(rng: random.Random) -> Request:
    """DART: the slots of a restaurant as triples, and two texts about it."""
    request = make_restaurant(rng)
    name, *slots = (slot.split(" : ") for slot in request.source.split(" | "))
    source = linearise_triples([(name[1], slot, value) for slot, value in slots])
    return Request(source, request.references[:2])


def make_dialogue(rng: random.Random) -> Request:
    """SAMSum: a dialogue of three to eight turns in the instruction format, and a summary of what the two agree on."""
    names = follow("dialogues", "dialogue", rng)
    lines = (names["hello"] + names["turns"] + names["bye"]).splitlines()
    turns = [f"{names['ab'[number % 2]]}: {line}" for number, line in enumerate(lines)]
    return Request(instruct("\n".join(turns)), (names["summary"],))


LABELLED: dict[str, Callable[[random.Random, int], Texts]] = {
    "sst2": make_review,
    **{task: partial(make_pair, task=task) for task in ("qnli", "qqp", "mnli")},
}
PAIRED: dict[str, Callable[[random.Random], Request]] = {
    "e2e": make_restaurant,
    "dart": make_triples_and_texts,
    "samsum": make_dialogue,
}


TRAIN, VALID, REQUESTS = 2000, 200, 100
"""Training examples of each task, those of a validation set with labels, requests of a validation or test set."""
SOURCE = "made up by groupwise from templates (seed 0)"


def synthetic_labelled(task: str) -> LabelledText:
    """Synthetic sst2, qnli, qqp or mnli: 2,000 training texts and 200 per validation set, with balanced classes.

    They are the same on every machine; no text is in two sets.
    """
    rng, seen, classes = random.Random(f"{task} 0"), set[Texts](), GLUE[task].classes

    def examples(count: int) -> Labelled:
        """New examples with labels in equal numbers, shuffled."""
        rows: list[tuple[Texts, int]] = []
        while len(rows) < count:
            label = len(rows) % len(classes)
            texts = LABELLED[task](rng, label)
            if texts not in seen:
                seen.add(texts)
                rows.append((texts, label))
        rng.shuffle(rows)
        return Labelled([texts for texts, _ in rows], [label for _, label in rows])

    train = examples(TRAIN)
    valid = {name: examples(VALID) for name in GLUE[task].valid}
    content = [[part.texts, part.labels] for part in (train, *valid.values())]
    return LabelledText(train, valid, classes, SOURCE, {f"synthetic/{task}": sha256_of_examples(content)})


def synthetic_paired(task: str) -> PairedText:
    """Synthetic e2e, dart or samsum: 2,000 training pairs, 100 requests for validation and 100 for testing.

    The sources have the same form as those of files: linearised tables, dialogues with an instruction. They are the
    same on every machine; no source is in two sets. E2E has four references per source, DART two and SAMSum one.
    """
    rng, seen = random.Random(f"{task} 0"), set[str]()

    def new_request() -> Request:
        while (request := PAIRED[task](rng)).source in seen:
            pass
        seen.add(request.source)
        return request

    train: list[tuple[str, str]] = []
    while len(train) < TRAIN:
        request = new_request()
        train += [(request.source, reference) for reference in request.references]
    rng.shuffle(train)
    valid = [new_request() for _ in range(REQUESTS)]
    test = [new_request() for _ in range(REQUESTS)]
    content = [train, *([[r.source, r.references] for r in part] for part in (valid, test))]
    return PairedText(train, valid, test, SOURCE, {f"synthetic/{task}": sha256_of_examples(content)})
