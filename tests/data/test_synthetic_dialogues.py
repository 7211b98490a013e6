"""Dialogues: two people in turn, in SAMSum's form, and a summary of one sentence that the dialogue bears out."""

import random
import re

from groupwise.data.synthetic_dialogues import DAYS, GOODS, NAMES, THINGS, make_dialogue


def test_two_people_speak_and_the_summary_is_about_them():
    rng = random.Random(0)
    for _ in range(300):
        request = make_dialogue(rng)
        first, *turns, last = request.source.split("\n")
        assert first == "Summarize the following dialogue" and last == "TL;DR"
        speakers = {turn.split(": ")[0] for turn in turns}
        assert len(speakers) == 2 and 3 <= len(turns) <= 8
        (summary,) = request.references
        assert summary.count(".") == 1 and summary.endswith(".")
        assert all(name in request.source for name in NAMES if re.search(rf"\b{name}\b", summary))
        assert speakers & set(re.findall(r"\w+", summary))


def test_what_the_summary_names_was_said():
    rng = random.Random(0)
    for _ in range(300):
        request = make_dialogue(rng)
        said, summary = request.source, request.references[0]
        assert all(word in said for word in (*DAYS, *GOODS, *THINGS) if word in summary)


def test_the_first_idea_is_not_always_the_summary():
    rng = random.Random(0)
    moved = 0
    for _ in range(300):
        request = make_dialogue(rng)
        days = [day for day in re.findall(r"\w+", request.source) if day in DAYS]
        moved += bool(days) and days[0] not in request.references[0]
    assert moved > 20
