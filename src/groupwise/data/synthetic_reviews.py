"""Made-up sentences on films, negative (0) or positive (1), for SST-2: with negations and clauses that disagree."""

# ruff: noqa: SIM905 (word lists read better as one string)

import random

from groupwise.data.text_examples import Texts

ASPECTS = (
    "plot acting dialogue score camerawork ending pacing cast script humor story direction editing soundtrack romance "
    "animation finale suspense staging narration"
).split()
THINGS = "film movie drama comedy thriller picture story documentary sequel debut adventure romance".split()
ADJECTIVES = (
    (
        "dull tedious clumsy shallow predictable lifeless muddled hollow stale awkward bland tiresome forgettable "
        "incoherent lazy sloppy grating contrived dreary pointless feeble annoying flat messy"
    ).split(),
    (
        "moving clever charming brilliant graceful gripping fresh tender witty inventive stunning honest warm lively "
        "touching elegant memorable delightful vivid thoughtful superb enjoyable rich polished"
    ).split(),
)
VERBS = (
    (
        "falls flat",
        "drags on and on",
        "goes nowhere",
        "wears out its welcome",
        "never comes to life",
        "misses the mark",
        "collapses halfway through",
        "left me cold",
    ),
    (
        "works beautifully",
        "holds your attention throughout",
        "lifts the whole film",
        "never hits a false note",
        "hits the mark",
        "rewards your patience",
        "pulls you right in",
        "won me over",
    ),
)
DEGREES = ("", "", "very ", "truly ", "rather ", "utterly ", "consistently ", "surprisingly ")
NEGATIONS = ("not ", "never ", "hardly ", "far from ", "anything but ")
OPENINGS = ("", "", "", "overall , ", "in the end , ", "for me , ", "as it happens , ")
ENDINGS = ("", " .", " .", " , and that is all there is to say .", " from start to finish .")


def make_review(rng: random.Random, label: int) -> Texts:
    """One lower-case sentence of that sentiment; where two clauses disagree, the main one decides."""
    first, second = rng.sample(ASPECTS, 2)
    good, bad = _clause(rng, first, label), _clause(rng, second, 1 - label)
    adjective, another = rng.sample(ADJECTIVES[label], 2)
    body = rng.choice(
        (
            good,
            good,
            good,
            f"{good} and {_clause(rng, second, label)}",
            f"a {rng.choice(DEGREES)}{adjective} {rng.choice(THINGS)} with {another} {first}",
            f"{rng.choice(('one', 'this is one', 'just another'))} {adjective} , {another} {rng.choice(THINGS)}",
            f"{bad} , but {good}",
            rng.choice((f"although {bad} , {good}", f"{good} , even though {bad}")),
        )
    )
    return rng.choice(OPENINGS) + body + rng.choice(ENDINGS), None


def _clause(rng: random.Random, aspect: str, label: int) -> str:
    kind = rng.randrange(6)
    if kind < 2:
        return f"the {aspect} {rng.choice(VERBS[label])}"
    if kind == 2:
        return f"the {aspect} is {rng.choice(NEGATIONS)}{rng.choice(ADJECTIVES[1 - label])}"
    return f"the {aspect} is {rng.choice(DEGREES)}{rng.choice(ADJECTIVES[label])}"
