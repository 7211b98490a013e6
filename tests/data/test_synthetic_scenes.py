"""Premises and hypotheses: what follows, what may be, what cannot be."""

import random

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from groupwise.data.synthetic_scenes import ACTIVITIES, PLACES, TIMES, make_news_pair, make_scene_pair


def drawn(make, count: int = 900) -> list[tuple[str, str, int]]:
    rng = random.Random(0)
    return [(*make(rng, label), label) for label in (0, 1, 2) * (count // 3)]


def test_a_scene_that_follows_adds_nothing_to_the_premise():
    for premise, hypothesis, label in drawn(make_scene_pair):
        if label == 0:
            assert all(place in premise for place, _ in PLACES if place in hypothesis)
            assert all(time in premise for time in TIMES if time in hypothesis)
            assert " not " in hypothesis or all(what in premise for what, _ in ACTIVITIES if what in hypothesis)


def test_a_scene_that_cannot_be_is_at_odds_with_the_premise():
    for premise, hypothesis, label in drawn(make_scene_pair):
        if label == 2:
            details = [*(place for place, _ in PLACES), *TIMES, *(what for what, _ in ACTIVITIES)]
            differs = any(detail in hypothesis and detail not in premise for detail in details)
            indoors = next(inside for place, inside in PLACES if place in premise)
            wrong_side = ("outdoors" if indoors else "indoors") in hypothesis
            assert differs or wrong_side or " not " in hypothesis or "Nobody" in hypothesis, (premise, hypothesis)


def test_the_hypothesis_alone_does_not_suffice():
    pairs = drawn(make_scene_pair, 1800)
    counts, labels = CountVectorizer().fit_transform([pair[1] for pair in pairs]), [pair[2] for pair in pairs]
    accuracy = LogisticRegression(max_iter=1000).fit(counts[:1500], labels[:1500]).score(counts[1500:], labels[1500:])
    assert 0.4 < accuracy < 0.8


def test_news_come_from_other_templates():
    scenes = {premise for premise, _, _ in drawn(make_scene_pair)}
    news = drawn(make_news_pair)
    assert not scenes & {premise for premise, _, _ in news}
    assert all(first[0].isupper() and first.endswith(".") and second.endswith(".") for first, second, _ in news)
