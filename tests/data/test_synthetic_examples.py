"""Made-up examples: labels are true, texts say what their sources say, and words are hints and not the answer."""

import random
from collections.abc import Callable, Sequence

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from groupwise.data.synthetic_text import (
    make_question_and_sentence,
    make_question_pair,
    make_review,
    make_scene_pair,
    read_rules,
)

REVIEWS, SCENES, DIALOGUES = read_rules("reviews"), read_rules("scenes"), read_rules("dialogues")
QUESTIONS, KINDS = read_rules("questions")["kinds"], read_rules("facts")["kinds"]
ADJECTIVES = (REVIEWS["bad"], REVIEWS["good"])


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


def test_words_alone_do_not_tell_whether_a_sentence_answers():
    rng = random.Random(0)
    labels = [0, 1] * 2500
    texts = ["\n".join(make_question_and_sentence(rng, label)) for label in labels]
    assert 0.6 < accuracy_of_words(texts, labels, 4000) < 0.85


# -- premises and hypotheses ----------------------------------------------------------------------------------------


def drawn(make: Callable[[random.Random, int], tuple[str, str | None]], count: int = 900) -> list[tuple[str, str, int]]:
    rng = random.Random(0)
    return [(*make(rng, label), label) for label in (0, 1, 2) * (count // 3)]


def test_the_hypothesis_alone_does_not_suffice():
    pairs = drawn(make_scene_pair, 1800)
    assert 0.4 < accuracy_of_words([pair[1] for pair in pairs], [pair[2] for pair in pairs], 1500) < 0.8


# -- restaurants ----------------------------------------------------------------------------------------------------


# -- dialogues ------------------------------------------------------------------------------------------------------
