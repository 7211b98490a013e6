"""Restaurants: the form of E2E's tables, and descriptions that say what the table says."""

import random
import re

from groupwise.data.synthetic_restaurants import PRICES, make_restaurant

SLOT_ORDER = ["name", "Type", "food", "price", "customer rating", "area", "family friendly", "near"]


def test_the_sources_have_e2es_slots_in_its_order():
    rng = random.Random(0)
    for _ in range(200):
        names = [slot.split(" : ")[0] for slot in make_restaurant(rng).source.split(" | ")]
        assert names == [name for name in SLOT_ORDER if name in names] and names[0] == "name" and len(names) >= 3


def test_each_of_four_descriptions_has_every_fact():
    rng = random.Random(0)
    for _ in range(200):
        request = make_restaurant(rng)
        slots = dict(slot.split(" : ") for slot in request.source.split(" | "))
        assert len(set(request.references)) == 4
        for text in request.references:
            assert text[0].isupper() and text.endswith(".") and "  " not in text and not re.search(r"\ba [aeiou]", text)
            literal = [slots[name] for name in ("name", "Type", "customer rating", "near") if name in slots]
            literal += [slots["food"].split()[0]] if "food" in slots else []
            literal += [{"riverside": "river", "city centre": "city centre"}[slots["area"]]] if "area" in slots else []
            assert all(word in text for word in literal), (request.source, text)
            assert "price" not in slots or any(phrase in text for phrase in PRICES[slots["price"]])
            kids = re.search("family friendly|children|kids", text, re.IGNORECASE)
            assert (kids is not None) == ("family friendly" in slots)
