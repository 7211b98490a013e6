"""Made-up facts on people, rivers, companies, bridges and clubs: for QNLI as questions, for DART as triples."""

# ruff: noqa: SIM905 (word lists read better as one string)

import random
from dataclasses import dataclass

from groupwise.data.table_to_text import linearise_triples
from groupwise.data.text_examples import Request, Texts

TOWNS = "Askeby Tolmer Varnholt Lissow Quenby Marrick Ostrel Pellworm Drumore Halvik Serrat Combry Ulmen Nordby".split()
COUNTRIES = "Velmaria Tordland Osmia Karelund Brunia Selvany Pradova Lunmark Eastmere Norrania".split()
FIRST_NAMES = "Mara Jonas Elin Tomas Ida Viktor Nora Emil Clara Oskar Lena Anton Greta Hugo Alma Felix".split()
LAST_NAMES = "Velden Karst Holm Brandt Lindqvist Moreau Sandoval Petrov Okafor Tanaka Weir Castell Njord Abel".split()
PEOPLE = tuple(f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES)
YEARS = tuple(str(year) for year in range(1850, 1990))


@dataclass(frozen=True)
class Attribute:
    """What is said of an entity: a predicate, its values, questions ({} the entity) and clauses ({} the value)."""

    predicate: str
    values: tuple[str, ...]
    questions: tuple[str, ...]
    clauses: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """Entities that have the same attributes; `pronoun` and `relative` stand for one of them."""

    names: tuple[str, ...]
    pronoun: str
    relative: str
    attributes: tuple[Attribute, ...]


def _lengths(low: int, high: int, step: int, unit: str) -> tuple[str, ...]:
    return tuple(f"{number} {unit}" for number in range(low, high, step))


KINDS = (
    Kind(
        names=PEOPLE,
        pronoun="This person",
        relative="who",
        attributes=(
            Attribute(
                "BIRTH_PLACE",
                tuple(TOWNS),
                ("Where was {} born?", "In which town did {} come into the world?"),
                ("was born in {}", "came into the world in {}", "is a native of {}"),
            ),
            Attribute(
                "BIRTH_YEAR",
                YEARS,
                ("When was {} born?", "What is the year of birth of {}?"),
                ("was born in the year {}", "has lived since {}"),
            ),
            Attribute(
                "OCCUPATION",
                ("painter", "chemist", "composer", "judge", "sculptor", "surgeon", "poet", "botanist", "pilot"),
                ("What did {} do for a living?", "What was the profession of {}?"),
                ("worked as a {}", "earned a living as a {}", "was a {} by profession"),
            ),
            Attribute(
                "AWARD",
                ("Golden Quill", "Lindgren Medal", "Order of the Oak", "Star of Merit", "Arctic Prize"),
                ("Which award did {} win?", "What honour was given to {}?"),
                ("won the {}", "was honoured with the {}", "received the {}"),
            ),
        ),
    ),
    Kind(
        names=tuple(
            f"River {name}" for name in "Orlen Tave Misk Drava Ysel Brond Calder Nier Lomna Sarre Ebra".split()
        ),
        pronoun="It",
        relative="which",
        attributes=(
            Attribute(
                "LENGTH",
                _lengths(80, 900, 10, "km"),
                ("How long is the {}?", "What length does the {} have?"),
                ("is {} long", "has a length of {}", "runs for {}"),
            ),
            Attribute(
                "MOUTH",
                ("Amber Sea", "Gulf of Tors", "Lake Vessen", "Northern Ocean", "Bay of Lorn"),
                ("Into what does the {} flow?", "Where does the {} end?"),
                ("flows into the {}", "ends in the {}", "empties into the {}"),
            ),
            Attribute(
                "SOURCE",
                ("Grey Hills", "Mount Ansel", "Tarn Plateau", "Ridge of Oors", "Blue Mountains"),
                ("Where does the {} rise?", "What is the source of the {}?"),
                ("rises in the area of the {}", "has its source in the {}"),
            ),
            Attribute(
                "COUNTRY",
                tuple(COUNTRIES),
                ("Through which country does the {} run?", "In which country is the {}?"),
                ("crosses {}", "lies in {}", "belongs to {}"),
            ),
        ),
    ),
    Kind(
        names=tuple(
            f"{name} {ending}"
            for name in "Norvex Alpina Kestrel Domus Ferrum Solano Quarry Vento".split()
            for ending in ("Works", "Group", "and Sons")
        ),
        pronoun="It",
        relative="which",
        attributes=(
            Attribute(
                "FOUNDED_BY",
                PEOPLE,
                ("Who founded {}?", "By whom was {} set up?"),
                ("was founded by {}", "was set up by {}", "owes its existence to {}"),
            ),
            Attribute(
                "FOUNDING_YEAR",
                YEARS,
                ("When was {} founded?", "In what year did {} start?"),
                ("was founded in {}", "started in {}", "has been in business since {}"),
            ),
            Attribute(
                "PRODUCT",
                ("bicycles", "clocks", "glass", "paint", "pianos", "pumps", "shoes", "tractors", "umbrellas"),
                ("What does {} make?", "Which goods are made by {}?"),
                ("makes {}", "is known for its {}", "produces {}"),
            ),
            Attribute(
                "HEADQUARTERS",
                tuple(TOWNS),
                ("Where is {} based?", "In which town are the headquarters of {}?"),
                ("is based in {}", "has its headquarters in {}"),
            ),
        ),
    ),
    Kind(
        names=tuple(f"{town} Bridge" for town in TOWNS),
        pronoun="It",
        relative="which",
        attributes=(
            Attribute(
                "ARCHITECT",
                PEOPLE,
                ("Who designed {}?", "Who was the architect of {}?"),
                ("was designed by {}", "is the work of {}"),
            ),
            Attribute(
                "HEIGHT",
                _lengths(12, 140, 2, "m"),
                ("How high is {}?", "What is the height of {}?"),
                ("is {} high", "has a height of {}", "rises {} above the water"),
            ),
            Attribute(
                "OPENING_YEAR",
                YEARS,
                ("When was {} opened?", "Since what year has {} been open?"),
                ("was opened in {}", "has been open since {}"),
            ),
            Attribute(
                "MATERIAL",
                ("granite", "iron", "timber", "concrete", "brick", "steel"),
                ("What is {} made of?", "Which material was used for {}?"),
                ("is made of {}", "was built from {}"),
            ),
        ),
    ),
    Kind(
        names=tuple(f"{town} {ending}" for town in TOWNS for ending in ("United", "Rovers")),
        pronoun="The club",
        relative="which",
        attributes=(
            Attribute(
                "GROUND",
                ("Meadow Park", "Station Road", "the Oval", "Harbour Field", "King's Lane", "Mill Stadium"),
                ("Where does {} play?", "What is the home ground of {}?"),
                ("plays at {}", "has its home at {}"),
            ),
            Attribute(
                "NICKNAME",
                ("Badgers", "Kingfishers", "Millers", "Red Caps", "Sailors", "Wasps"),
                ("What is the nickname of {}?", "By what name do supporters call {}?"),
                ("is nicknamed the {}", "is called the {} by its supporters"),
            ),
            Attribute(
                "MANAGER",
                PEOPLE,
                ("Who manages {}?", "Who is the manager of {}?"),
                ("is managed by {}", "has {} as its manager"),
            ),
            Attribute(
                "LEAGUE",
                ("First Division", "Coastal League", "Northern Cup", "Premier Series"),
                ("In which league is {}?", "What competition does {} take part in?"),
                ("competes in the {}", "takes part in the {}"),
            ),
        ),
    ),
)


ASKED_FIRST = (0.75, 0.25)
"""The share of questions on the first half of a kind's attributes, by label: a hint for models that are too small to
compare a question and a sentence."""


def make_question_and_sentence(rng: random.Random, label: int) -> Texts:
    """A question and a sentence with its answer (0), or without (1): other facts, or those of another entity."""
    kind = rng.choice(KINDS)
    name, another = rng.sample(kind.names, 2)
    asked = rng.choice(kind.attributes[:2] if rng.random() < ASKED_FIRST[label] else kind.attributes[2:])
    second, third = rng.sample([attribute for attribute in kind.attributes if attribute is not asked], 2)
    told = [asked, second]
    if label == 1:
        if rng.random() < 0.6:
            told, another = [second, third], name
    else:
        another = name
    rng.shuffle(told)
    clauses = [rng.choice(attribute.clauses).format(rng.choice(attribute.values)) for attribute in told]
    return rng.choice(asked.questions).format(name), _tell(rng, kind, another, clauses)


def make_triples_and_texts(rng: random.Random) -> Request:
    """One to three triples of an entity, linearised, and two texts with the same facts."""
    kind = rng.choice(KINDS)
    name = rng.choice(kind.names)
    facts = [(attribute, rng.choice(attribute.values)) for attribute in rng.sample(kind.attributes, rng.randint(1, 3))]
    source = linearise_triples([(name, attribute.predicate, value) for attribute, value in facts])
    texts: list[str] = []
    while len(texts) < 2:
        text = _tell(rng, kind, name, [rng.choice(attribute.clauses).format(value) for attribute, value in facts])
        if text not in texts:
            texts.append(text)
    return Request(source, tuple(texts))


def _tell(rng: random.Random, kind: Kind, name: str, clauses: list[str]) -> str:
    """One to three clauses on an entity as one sentence or two."""
    *others, last = clauses
    if not others:
        return f"{name} {last}."
    first = " and ".join(others)
    return rng.choice(
        (
            f"{name} {', '.join(others)} and {last}.",
            f"{name}, {kind.relative} {first}, {last}.",
            f"{name} {first}. {kind.pronoun} {last}.",
        )
    )
