"""Facts: a question is answered by the sentence or not, and triples and texts say the same."""

import random

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from groupwise.data.synthetic_facts import KINDS, make_question_and_sentence, make_triples_and_texts


def test_a_sentence_answers_the_question_exactly_where_the_label_says_so():
    rng = random.Random(0)
    elsewhere = 0
    for label in (0, 1) * 300:
        question, sentence = make_question_and_sentence(rng, label)
        asked = [
            (name, attribute)
            for kind in KINDS
            for name in kind.names
            for attribute in kind.attributes
            if question in [wording.format(name) for wording in attribute.questions]
        ]
        assert len(asked) == 1, question
        name, attribute = asked[0]
        about = sentence.startswith((f"{name} ", f"{name}, "))
        answered = about and any(f" {c.format(v)}" in sentence for c in attribute.clauses for v in attribute.values)
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


def test_words_are_a_hint_and_not_the_answer():
    rng = random.Random(0)
    labels = [0, 1] * 2500
    texts = ["\n".join(make_question_and_sentence(rng, label)) for label in labels]
    counts = CountVectorizer().fit_transform(texts)
    accuracy = LogisticRegression(max_iter=1000).fit(counts[:4000], labels[:4000]).score(counts[4000:], labels[4000:])
    assert 0.6 < accuracy < 0.85
