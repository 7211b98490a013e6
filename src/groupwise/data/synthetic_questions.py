"""Made-up pairs of questions for QQP: the same question in other words (1), or another about nearly the same (0)."""

# ruff: noqa: SIM905 (word lists read better as one string)

import random

from groupwise.data.text_examples import Texts

SUBJECTS = {
    "skill": "chess,Italian,the violin,salsa dancing,touch typing,pottery,statistics,swimming,Japanese,juggling,"
    "algebra,woodworking,the guitar,photography,sign language,calligraphy,baking,knitting".split(","),
    "thing": "a used car,a good mattress,a hearing aid,a wood stove,a road bike,a dental crown,a solar panel,a tent,"
    "a piano,a heat pump,a drone,a microscope,a rowing machine,a telescope,a sewing machine,a canoe".split(","),
    "place": "Portugal,Iceland,Kyoto,Morocco,the Alps,Vietnam,Lisbon,Peru,Norway,Sicily,Georgia,Chile,Scotland,Crete,"
    "New Zealand,Estonia,Jordan,Slovenia".split(","),
    "ailment": "back pain,a dry cough,insomnia,hay fever,a sore throat,migraines,a stiff neck,heartburn,dry skin,"
    "a sprained ankle,sunburn,a toothache,knee pain,seasickness,dandruff,hiccups".split(","),
}
INTENTS = {
    "skill": (
        ("How do I learn {} quickly?", "What is the fastest way to learn {}?", "How can I pick up {} in a short time?"),
        ("Is {} hard to learn?", "How difficult is it to get started with {}?", "Do beginners struggle with {}?"),
        ("Which book on {} is the best?", "What should I read about {}?", "Can you recommend a book on {}?"),
        ("Can I make money with {}?", "Is it possible to earn a living from {}?", "How do people get paid for {}?"),
    ),
    "thing": (
        ("How much does {} cost?", "What is the price of {}?", "What do people usually pay for {}?"),
        ("How long does {} last?", "After how many years must {} be replaced?", "What is the lifetime of {}?"),
        ("Where should I buy {}?", "Which shops sell {}?", "What is the best place to get {}?"),
        ("How do I repair {} myself?", "Can {} be fixed at home?", "What do I need in order to mend {}?"),
    ),
    "place": (
        ("When is the best time to visit {}?", "Which month is best for a trip to {}?", "When should I go to {}?"),
        ("Is it safe to travel to {} alone?", "Can I visit {} on my own?", "How risky is {} for a single traveller?"),
        ("What should I eat in {}?", "Which dishes is {} known for?", "What is the best food in {}?"),
        ("How expensive is {}?", "How much money do I need for a week in {}?", "What does a holiday in {} cost?"),
    ),
    "ailment": (
        ("How can I get rid of {}?", "What helps against {}?", "What is a good cure for {}?"),
        ("What causes {}?", "Why do people get {}?", "Where does {} come from?"),
        ("How can I prevent {}?", "What should I do so as not to get {}?", "How does one avoid {}?"),
        ("Should I see a doctor about {}?", "When is {} serious?", "Is {} a reason to go to the hospital?"),
    ),
}
ADDITIONS = (" Any advice?", " I really want to know.", " Please help.")
ADDED = (0.6, 0.2)
"""The share of questions with an addition, by label: a hint for models that are too small to compare two questions."""


def make_question_pair(rng: random.Random, label: int) -> Texts:
    """Two questions. Those that differ ask another thing of the same subject, or the same of another."""
    kind = rng.choice(sorted(INTENTS))
    intent = rng.choice(INTENTS[kind])
    subject, another = rng.sample(SUBJECTS[kind], 2)
    first, second = rng.sample(intent, 2)
    if label == 0:
        if rng.random() < 0.7:
            second = rng.choice(rng.choice([other for other in INTENTS[kind] if other is not intent]))
        else:
            subject, second = another, second.replace("{}", subject)
    return _add(rng, first.format(subject), label), _add(rng, second.format(subject), label)


def _add(rng: random.Random, question: str, label: int) -> str:
    return question + rng.choice(ADDITIONS) if rng.random() < ADDED[label] else question
