"""Made-up examples: labels are true, texts say what their sources say, and words are hints and not the answer."""

import random
import re
from collections.abc import Callable, Sequence

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from groupwise.data.synthetic_text import (
    LABELLED,
    make_dialogue,
    make_question_and_sentence,
    make_question_pair,
    make_restaurant,
    make_review,
    make_scene_pair,
    make_triples_and_texts,
    read_rules,
)

REVIEWS, SCENES, DIALOGUES = read_rules("reviews"), read_rules("scenes"), read_rules("dialogues")
QUESTIONS, KINDS = read_rules("questions")["kinds"], read_rules("facts")["kinds"]
ADJECTIVES = (REVIEWS["bad"], REVIEWS["good"])
make_news_pair = LABELLED["mnli"]["mismatched"]


def accuracy_of_words(texts: Sequence[str], labels: Sequence[int], train: int) -> float:
    """What counts of words alone can tell, learned from the first `train` texts, judged on the others."""
    counts = CountVectorizer().fit_transform(texts)
    return LogisticRegression(max_iter=1000).fit(counts[:train], labels[:train]).score(counts[train:], labels[train:])


# -- reviews --------------------------------------------------------------------------------------------------------


def test_a_negation_turns_an_adjective_around():
    rng = random.Random(0)
    sentences = [(make_review(rng, label)[0], label) for label in (0, 1) * 6000]
    found = [(s, label) for s, label in sentences if " not " in s and not {",", "and"} & set(s.split())]
    assert len(found) > 20
    for sentence, label in found:
        (word,) = set(sentence.split()) & {word for words in ADJECTIVES for word in words}
        assert word in ADJECTIVES[1 - label], sentence


def test_the_main_clause_decides():
    rng = random.Random(0)
    for label in (0, 1) * 2000:
        sentence = make_review(rng, label)[0]
        if " , but " in sentence:
            last = sentence.split(" , but ")[1]
            good = any(f" {word}" in f" {last}" for word in ADJECTIVES[label])
            turned = any(f"{negation} " in last for negation in ("not", "never", "hardly", "far from", "anything but"))
            other = any(f" {word}" in f" {last}" for word in ADJECTIVES[1 - label])
            assert not other or turned or good, sentence


def test_words_alone_do_not_tell_a_reviews_sentiment():
    rng = random.Random(0)
    labels = [0, 1] * 1100
    sentences = [make_review(rng, label)[0] for label in labels]
    assert 0.65 < accuracy_of_words(sentences, labels, 2000) < 0.95


# -- pairs of questions ---------------------------------------------------------------------------------------------


def meaning(question: str) -> tuple[str, int, str]:
    """Kind, intent and subject of a question; its wording must be unique."""
    found = [
        (name, number, subject)
        for name, kind in QUESTIONS.items()
        for number, wordings in enumerate(kind["intents"])
        for wording in wordings
        for subject in kind["subjects"]
        if question.startswith(wording.format(subject))
    ]
    assert len(found) == 1, question
    return found[0]


def test_questions_are_the_same_exactly_where_the_label_says_so():
    rng = random.Random(0)
    other_subject = 0
    for label in (0, 1) * 150:
        first, second = map(meaning, make_question_pair(rng, label))
        assert (first == second) == bool(label)
        assert first[0] == second[0] and (first[1] == second[1] or first[2] == second[2])
        other_subject += first[2] != second[2]
    assert 20 < other_subject < 75


def test_words_alone_do_not_tell_whether_questions_are_the_same():
    rng = random.Random(0)
    labels = [0, 1] * 2500
    texts = ["\n".join(make_question_pair(rng, label)) for label in labels]
    assert 0.6 < accuracy_of_words(texts, labels, 4000) < 0.85


# -- facts ----------------------------------------------------------------------------------------------------------


def test_a_sentence_answers_the_question_exactly_where_the_label_says_so():
    rng = random.Random(0)
    elsewhere = 0
    for label in (0, 1) * 300:
        question, sentence = make_question_and_sentence(rng, label)
        asked = [
            (name, attribute)
            for kind in KINDS
            for name in kind["names"]
            for attribute in kind["attributes"]
            if question in [wording.format(name) for wording in attribute["questions"]]
        ]
        assert len(asked) == 1, question
        name, attribute = asked[0]
        about = sentence.startswith((f"{name} ", f"{name}, "))
        clauses = (clause.format(value) for clause in attribute["clauses"] for value in attribute["values"])
        answered = about and any(f" {clause}" in sentence for clause in clauses)
        assert answered == (label == 0), (question, sentence)
        elsewhere += not about
    assert 60 < elsewhere < 180


def test_triples_and_texts_have_the_same_values():
    rng = random.Random(0)
    sizes = set()
    for _ in range(300):
        request = make_triples_and_texts(rng)
        triples = [triple.split(" : ") for triple in request.source.split(" | ")]
        sizes.add(len(triples))
        assert len(set(request.references)) == 2 and len({name for name, _, _ in triples}) == 1
        for name, predicate, value in triples:
            assert predicate == predicate.lower()
            assert all(text.startswith(name) and value in text for text in request.references)
    assert sizes == {1, 2, 3}


def test_words_alone_do_not_tell_whether_a_sentence_answers():
    rng = random.Random(0)
    labels = [0, 1] * 2500
    texts = ["\n".join(make_question_and_sentence(rng, label)) for label in labels]
    assert 0.6 < accuracy_of_words(texts, labels, 4000) < 0.85


# -- premises and hypotheses ----------------------------------------------------------------------------------------


def drawn(make: Callable[[random.Random, int], tuple[str, str | None]], count: int = 900) -> list[tuple[str, str, int]]:
    rng = random.Random(0)
    return [(*make(rng, label), label) for label in (0, 1, 2) * (count // 3)]


def test_a_scene_that_follows_adds_nothing_to_the_premise():
    for premise, hypothesis, label in drawn(make_scene_pair):
        if label == 0:
            assert all(place in premise for place, *_ in SCENES["places"] if place in hypothesis)
            assert all(time in premise for time in SCENES["times"] if time in hypothesis)
            told = all(what in premise for what, _ in SCENES["activities"] if what in hypothesis)
            assert " not " in hypothesis or told


def test_a_scene_is_indoors_exactly_where_its_place_is():
    labels = set()
    for premise, hypothesis, label in drawn(make_scene_pair):
        inside = any(place in premise for place in ("in the kitchen", "cafe", "waiting room", "library"))
        if "doors" in hypothesis:
            assert (("indoors" in hypothesis) == inside) == (label == 0), (premise, hypothesis)
            labels.add(label)
    assert labels == {0, 2}


def test_a_scene_that_cannot_be_is_at_odds_with_the_premise():
    for premise, hypothesis, label in drawn(make_scene_pair):
        if label == 2:
            details = [record[0] for rule in ("places", "activities") for record in SCENES[rule]] + SCENES["times"]
            differs = any(detail in hypothesis and detail not in premise for detail in details)
            wrong_side = next(wrong for place, _, wrong in SCENES["places"] if place in premise) in hypothesis
            assert differs or wrong_side or " not " in hypothesis or "Nobody" in hypothesis, (premise, hypothesis)


def test_the_hypothesis_alone_does_not_suffice():
    pairs = drawn(make_scene_pair, 1800)
    assert 0.4 < accuracy_of_words([pair[1] for pair in pairs], [pair[2] for pair in pairs], 1500) < 0.8


def test_news_come_from_other_templates():
    scenes = {premise for premise, _, _ in drawn(make_scene_pair)}
    news = drawn(make_news_pair)
    assert not scenes & {premise for premise, _, _ in news}
    assert all(first[0].isupper() and first.endswith(".") and second.endswith(".") for first, second, _ in news)


# -- restaurants ----------------------------------------------------------------------------------------------------

SLOT_ORDER = ["name", "Type", "food", "price", "customer rating", "area", "family friendly", "near"]
PRICES = {
    "cheap": "low prices|cheap",
    "moderate": "moderate prices|mid price range",
    "high": "high prices|expensive",
    "less than £20": "prices below £20|less than £20",
    "more than £30": "prices above £30|more than £30",
}


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
            assert text[0].isupper() and text.endswith(".") and "  " not in text
            assert not re.search(r"\ba [aeiou]", text, re.IGNORECASE)
            literal = [slots[name] for name in ("name", "Type", "customer rating", "near") if name in slots]
            literal += [slots["food"].split()[0]] if "food" in slots else []
            literal += [{"riverside": "river", "city centre": "city centre"}[slots["area"]]] if "area" in slots else []
            assert all(word in text for word in literal), (request.source, text)
            told = [price for price, wording in PRICES.items() if re.search(wording, text)]
            assert told == ([slots["price"]] if "price" in slots else []), (request.source, text)
            kids = re.search("family friendly|children|kids", text, re.IGNORECASE)
            assert (kids is not None) == ("family friendly" in slots)


# -- dialogues ------------------------------------------------------------------------------------------------------


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
        assert all(name in request.source for name in DIALOGUES["names"] if re.search(rf"\b{name}\b", summary))
        assert speakers & set(re.findall(r"\w+", summary))


def test_what_the_summary_names_was_said():
    rng = random.Random(0)
    named = [word for rule in ("days", "goods", "things") for word in DIALOGUES[rule]]
    for _ in range(300):
        request = make_dialogue(rng)
        assert all(word in request.source for word in named if word in request.references[0])


def test_the_first_idea_is_not_always_the_summary():
    rng = random.Random(0)
    moved = 0
    for _ in range(300):
        request = make_dialogue(rng)
        days = [day for day in re.findall(r"\w+", request.source) if day in DIALOGUES["days"]]
        moved += bool(days) and days[0] not in request.references[0]
    assert moved > 20
