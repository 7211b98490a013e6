"""Pairs of questions: the same question is of one intent and one subject, another is not."""

import random

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from groupwise.data.synthetic_questions import INTENTS, SUBJECTS, make_question_pair


def meaning(question: str) -> tuple[str, int, str]:
    """Kind, intent and subject of a question; its wording must be unique."""
    found = [
        (kind, number, subject)
        for kind, intents in INTENTS.items()
        for number, wordings in enumerate(intents)
        for wording in wordings
        for subject in SUBJECTS[kind]
        if question.startswith(wording.format(subject))
    ]
    assert len(found) == 1, question
    return found[0]


def test_labels_are_true():
    rng = random.Random(0)
    other_subject = 0
    for label in (0, 1) * 150:
        first, second = map(meaning, make_question_pair(rng, label))
        assert (first == second) == bool(label)
        assert first[0] == second[0] and (first[1] == second[1] or first[2] == second[2])
        other_subject += first[2] != second[2]
    assert 20 < other_subject < 75


def test_words_are_a_hint_and_not_the_answer():
    rng = random.Random(0)
    labels = [0, 1] * 2500
    texts = ["\n".join(make_question_pair(rng, label)) for label in labels]
    counts = CountVectorizer().fit_transform(texts)
    accuracy = LogisticRegression(max_iter=1000).fit(counts[:4000], labels[:4000]).score(counts[4000:], labels[4000:])
    assert 0.6 < accuracy < 0.85
