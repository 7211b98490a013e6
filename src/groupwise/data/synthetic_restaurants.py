"""Made-up restaurants for E2E: a meaning representation and four descriptions in other words."""

import random

from groupwise.data.table_to_text import linearise_mr
from groupwise.data.text_examples import Request

NAMES = [
    f"The {first} {second}"
    for first in ("Copper", "Silver", "Hidden", "Laughing", "Quiet", "Painted", "Old", "Crooked", "Lucky")
    for second in ("Kettle", "Heron", "Lantern", "Anchor", "Fig", "Spoon", "Orchard", "Barrel")
]
LANDMARKS = ("Mill Bridge", "Saint Olaf's Church", "the Old Harbour", "Café Merle", "the Clock Tower", "Linden Square")
SLOTS = {  # in the order of E2E's own MRs, with the share of MRs that have the slot
    "eatType": (0.7, ("restaurant", "pub", "coffee shop")),
    "food": (0.8, ("Italian", "French", "Indian", "Chinese", "Japanese", "English", "fast food")),
    "priceRange": (0.6, ("cheap", "moderate", "high", "less than £20", "more than £30")),
    "customer rating": (0.6, ("low", "average", "high", "1 out of 5", "3 out of 5", "5 out of 5")),
    "area": (0.6, ("riverside", "city centre")),
    "familyFriendly": (0.6, ("yes", "no")),
    "near": (0.5, LANDMARKS),
}
PRICES = {
    "cheap": ("with low prices", "that is cheap"),
    "moderate": ("with moderate prices", "in the mid price range"),
    "high": ("with high prices", "that is expensive"),
    "less than £20": ("with prices below £20", "where you pay less than £20"),
    "more than £30": ("with prices above £30", "where you pay more than £30"),
}
FAMILY = {
    "yes": ("It is family friendly.", "Children are welcome.", "You can bring the kids."),
    "no": ("It is not family friendly.", "It is not a place for children.", "Leave the kids at home."),
}


def make_restaurant(rng: random.Random) -> Request:
    """A name and at least two more slots, linearised, and four references with the same facts."""
    while True:
        slots = {slot: rng.choice(values) for slot, (share, values) in SLOTS.items() if rng.random() < share}
        if len(slots) >= 2:
            break
    slots = {"name": rng.choice(NAMES)} | slots
    mr = ", ".join(f"{slot}[{value}]" for slot, value in slots.items())
    return Request(linearise_mr(mr), tuple(_describe(rng, slots, frame) for frame in rng.sample(range(4), 4)))


def _describe(rng: random.Random, slots: dict[str, str], frame: int) -> str:
    """One description; the frames differ in how they begin, the rest of the wording is drawn."""
    name, kind = slots["name"], slots.get("eatType", "place")
    cuisine = slots["food"].replace("fast food", "fast") if "food" in slots else ""
    where = _where(rng, slots)
    price = f" {rng.choice(PRICES[slots['priceRange']])}" if "priceRange" in slots else ""
    serving = f" {rng.choice(('serving', 'with', 'that offers'))} {cuisine} food" if cuisine else ""
    if frame == 0:
        text = f"{name} is {_a(kind)}{where}{serving}{price}."
    elif frame == 1:
        text = f"there is {_a(kind)}{where} called {name}{price}." + (f" It serves {cuisine} food." if cuisine else "")
    elif frame == 2:
        wish = f"for {cuisine} food" if cuisine else rng.choice(("if you want to go out", "for an evening out"))
        text = f"{wish}, try {name}, {_a(kind)}{where}{price}."
    else:
        sort = f"{cuisine} {kind}" if cuisine not in ("", "fast") else f"{kind}{serving}"
        text = f"{_a(sort)}{where} is {name}{price}."
    extras = _extras(rng, slots)
    rng.shuffle(extras)
    return " ".join([text[0].upper() + text[1:], *extras])


def _where(rng: random.Random, slots: dict[str, str]) -> str:
    area = {"riverside": (" by the river", " in the riverside area"), "city centre": (" in the city centre",)}
    near = f" {rng.choice(('near', 'close to', 'next to'))} {slots['near']}" if "near" in slots else ""
    return (rng.choice(area[slots["area"]]) if "area" in slots else "") + near


def _extras(rng: random.Random, slots: dict[str, str]) -> list[str]:
    """Sentences on the rating and on families."""
    found = []
    if (rating := slots.get("customer rating")) is not None:
        found.append(rng.choice(("Customers rate it {}.", "Its customer rating is {}.")).format(rating))
    if "familyFriendly" in slots:
        found.append(rng.choice(FAMILY[slots["familyFriendly"]]))
    return found


def _a(noun: str) -> str:
    return f"a{'n' if noun[0] in 'aeiouAEIOU' else ''} {noun}"
