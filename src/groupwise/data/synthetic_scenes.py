"""Made-up premises and hypotheses for MNLI: entailment (0), neutral (1), contradiction (2)."""

# ruff: noqa: SIM905 (word lists read better as one string)

import random

from groupwise.data.text_examples import Texts

PEOPLE = (  # who, the verb, in more general words
    ("a young woman", "is", "a person"),
    ("an old man", "is", "a person"),
    ("a nurse", "is", "someone"),
    ("a little girl", "is", "a child"),
    ("a tall boy", "is", "a child"),
    ("two brothers", "are", "two people"),
    ("three farmers", "are", "some people"),
    ("several students", "are", "some people"),
    ("a group of tourists", "is", "a group of people"),
    ("two old friends", "are", "two people"),
    ("a man in a red coat", "is", "a man"),
    ("a woman with a hat", "is", "a woman"),
)
ACTIVITIES = (  # what, in more general words; nobody does two of them at once
    ("playing chess", "playing a game"),
    ("eating noodles", "having a meal"),
    ("reading a newspaper", "reading"),
    ("riding a bicycle", "riding"),
    ("painting a fence", "working"),
    ("feeding the ducks", "feeding birds"),
    ("repairing a boat", "repairing something"),
    ("dancing a waltz", "dancing"),
    ("drinking hot tea", "drinking something"),
    ("carrying a heavy box", "carrying something"),
    ("sleeping soundly", "asleep"),
    ("writing a letter", "writing"),
)
PLACES = (  # where, and whether that is indoors
    ("in the park", False),
    ("on the beach", False),
    ("beside the lake", False),
    ("in the school yard", False),
    ("on the balcony", False),
    ("in the kitchen", True),
    ("in a crowded cafe", True),
    ("in the waiting room", True),
    ("in the library", True),
)
TIMES = ("early in the morning", "at noon", "in the evening", "at midnight")
GUESSES = (  # what may be or not
    "for the first time",
    "because of a bet",
    "and thinking of a lost friend",
    "to please a relative",
)

ORGANISATIONS = "museum,library,bakery,airline,hospital,theatre,factory,university,zoo,bank,orchestra,hotel".split(",")
CHANGES = (  # what happened, what follows, the opposite
    ("raised its prices", "changed its prices", "lowered its prices"),
    ("lowered its prices", "became cheaper", "became more expensive"),
    ("opened a second branch", "has more than one branch", "has only one branch"),
    ("hired twenty people", "has new employees", "has not hired a single person"),
    ("closed its doors for good", "no longer exists", "is still open"),
    ("moved to a larger building", "is in another building now", "never moved"),
    ("won a national award", "received an award", "has never won anything"),
    ("lost its licence", "no longer has a licence", "still has its licence"),
    ("replaced its director", "has a new director", "kept its director"),
    ("doubled its budget", "spends more than before", "cut its budget"),
)
CAUSES = ("because of a new law", "after a long dispute", "to please its founder", "for the third time", "on a rumour")
MONTHS = "January February March April May June July August September October November December".split()


def make_scene_pair(rng: random.Random, label: int) -> Texts:
    """What people do somewhere, and a sentence that follows from it, may be true, or cannot be.

    The same words serve all three: a hypothesis can only be judged beside its premise, except that guesses stand out.
    """
    who, be, whoever = rng.choice(PEOPLE)
    (what, roughly), (another, _) = rng.sample(ACTIVITIES, 2)
    (where, indoors), (elsewhere, _) = rng.sample(PLACES, 2)
    time, other_time = rng.sample(TIMES, 2)
    when = rng.choice(("", "", f" {time}")) if label != 1 else ""
    anyone = rng.choice((who, whoever))
    if label == 0:
        choices = [
            f"{anyone} {be} {roughly}",
            f"{whoever} {be} {what}",
            f"{anyone} {be} {what} {where}",
            f"{anyone} {be} {'indoors' if indoors else 'outdoors'}",
            f"{anyone} {be} not {another}",
            f"{anyone} {be} {what}{when or ' ' + where}",
        ]
    elif label == 1:
        choices = [
            f"{anyone} {be} {what} {rng.choice(GUESSES)}",
            f"{anyone} {be} {roughly} {rng.choice(GUESSES)}",
            f"{anyone} {be} {what} {time}",
            f"{anyone} {be} {roughly} {where} {time}",
        ]
    else:
        choices = [
            f"nobody is {rng.choice((what, roughly))} {where}",
            f"{anyone} {be} {another}",
            f"{anyone} {be} {rng.choice((what, roughly))} {elsewhere}",
            f"{anyone} {be} {'outdoors' if indoors else 'indoors'}",
            f"{anyone} {be} not {rng.choice((what, roughly))}",
            f"{anyone} {be} {what}" + (f" {other_time}" if when else f" {elsewhere}"),
        ]
    return _sentence(f"{who} {be} {what} {where}{when}"), _sentence(rng.choice(choices))


def make_news_pair(rng: random.Random, label: int) -> Texts:
    """What became of an organisation, and a sentence as in `make_scene_pair`."""
    place = rng.choice(ORGANISATIONS)
    happened, follows, opposite = rng.choice(CHANGES)
    month = rng.choice(MONTHS)
    premise = rng.choice((f"in {month} the {place} {happened}", f"the {place} {happened} in {month} , we heard"))
    if label == 0:
        choices = [f"the {place} {follows}", f"the {place} {happened}", f"we heard that the {place} {follows}"]
    elif label == 1:
        cause = rng.choice(CAUSES)
        choices = [f"the {place} {happened} {cause}", f"the mayor is angry with the {place}"]
    else:
        choices = [f"the {place} {opposite}", f"nothing happened at the {place} in {month}"]
    return _sentence(premise), _sentence(rng.choice(choices))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].replace(" ,", ",") + "."
