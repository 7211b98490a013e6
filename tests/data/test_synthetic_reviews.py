"""Sentences on films: single words tell a part of the sentiment, not all of it."""

import random

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from groupwise.data.synthetic_reviews import ADJECTIVES, make_review


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


def test_words_alone_do_not_suffice():
    rng = random.Random(0)
    labels = [0, 1] * 1100
    sentences = [make_review(rng, label)[0] for label in labels]
    counts = CountVectorizer().fit_transform(sentences)
    accuracy = LogisticRegression(max_iter=1000).fit(counts[:2000], labels[:2000]).score(counts[2000:], labels[2000:])
    assert 0.65 < accuracy < 0.95
