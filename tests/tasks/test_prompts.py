import pytest

from groupwise.errors import UserError
from groupwise.tasks.samples import PROMPT_SETS, demonstrations, in_context_prompt

TRAIN = [(f"source {number}", f"target {number}") for number in range(40)]


def anything(_):
    return True


def test_prompt_sets_are_fixed_and_disjoint():
    sets = [demonstrations(TRAIN, 4, number, anything) for number in range(PROMPT_SETS)]
    assert sets == [demonstrations(TRAIN, 4, number, anything) for number in range(PROMPT_SETS)]
    assert [len(chosen) for chosen in sets] == [4, 4, 4]
    all_pairs = [*sets[0], *sets[1], *sets[2]]
    assert len(set(all_pairs)) == 12
    assert set(all_pairs) <= set(TRAIN)
    assert all_pairs != TRAIN[:12]  # a random choice, not the beginning of the file


def test_only_demonstrations_that_fit_are_chosen():
    def fits(text):
        assert text.startswith("source ") and " target " in text
        return len(text) <= len("source 1 target 1")  # the numbers of one digit

    chosen = [pair for number in range(3) for pair in demonstrations(TRAIN, 3, number, fits)]
    assert len(set(chosen)) == 9
    assert set(chosen) <= set(TRAIN[:10])
    with pytest.raises(UserError, match=r"eval.shots=4 needs 12 .* there are only 10"):
        demonstrations(TRAIN, 4, 0, fits)


def test_sources_are_not_repeated():
    rows = [(source, f"{target} in other words {k}") for source, target in TRAIN[:6] for k in range(5)]
    shown = [pair for number in range(3) for pair in demonstrations(rows, 2, number, anything)]
    assert sorted(source for source, _ in shown) == [source for source, _ in TRAIN[:6]]


def test_prompt_is_demonstrations_followed_by_the_source():
    source = "Summarize the following dialogue\nA: Hi!\r\nB: Bye.\nTL;DR"
    shown = [(source.replace("Hi", "Hello"), "A greets B."), ("Say it\nTL;DR", "Said.")]
    assert in_context_prompt(shown, source) == (
        "Summarize the following dialogue\nA: Hello!\r\nB: Bye.\nTL;DR A greets B.\n\n"
        "Say it\nTL;DR Said.\n\n"
        "Summarize the following dialogue\nA: Hi!\r\nB: Bye.\nTL;DR"
    )
    assert in_context_prompt([], source) == source
