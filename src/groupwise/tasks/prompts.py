"""k-shot prompts for in-context evaluation: training examples, word for word, before the input.

This evaluation has no privacy guarantee: the model is shown the demonstrations as they are, and may repeat them.
"""

import random
from collections.abc import Callable, Sequence

from groupwise.errors import UserError

PROMPT_SETS = 3
"""The paper samples three sets of prompts and averages over them (section on fine-tuning GPT-3 on SAMSum)."""


def demonstrations(
    train: Sequence[tuple[str, str]], shots: int, prompt_set: int, fits: Callable[[str], bool]
) -> list[tuple[str, str]]:
    """The `shots` training examples of prompt set 0, 1 or 2; the same ones in every run.

    Examples are drawn in a fixed random order, no source twice, and dealt to the three sets in turn. So no example is
    in two sets, and a set with fewer shots is the beginning of one with more.

    No privacy guarantee: these are training examples, shown as they are.

    Args:
        train: (source, target) pairs.
        shots: k; 0 gives none.
        fits: whether a demonstration, as it stands in the prompt, is short enough; the others are passed over.

    Raises:
        UserError: another prompt set; shots below 0; fewer examples that fit than three sets need.
    """
    if not 0 <= prompt_set < PROMPT_SETS:
        raise UserError(
            f"eval.prompt_set={prompt_set} is not one of the {PROMPT_SETS} sets of prompts: give 0, 1 or 2."
        )
    if shots < 0:
        raise UserError(f"eval.shots={shots} is less than none: give 0 or more examples to show in the prompt.")
    keys = random.Random(0)
    order = sorted(range(len(train)), key=[keys.random() for _ in train].__getitem__)
    chosen: list[tuple[str, str]] = []
    sources: set[str] = set()
    for index in order:
        if len(chosen) == shots * PROMPT_SETS:
            break
        source, target = train[index]
        if source not in sources and fits(_shown(source, target)):
            sources.add(source)
            chosen.append((source, target))
    if len(chosen) < shots * PROMPT_SETS:
        raise UserError(
            f"eval.shots={shots} needs {shots * PROMPT_SETS} training examples ({PROMPT_SETS} sets) that are short "
            f"enough for the model's context, and there are {len(chosen)}: give fewer shots."
        )
    return chosen[prompt_set::PROMPT_SETS]


def in_context_prompt(shown: Sequence[tuple[str, str]], source: str) -> str:
    """The demonstrations, each its source, a space and its target, and last the source to go on from; blank lines
    between. Without demonstrations it is the source alone (0-shot).

    No privacy guarantee: the demonstrations are training examples.
    """
    return "\n\n".join([*(_shown(*pair) for pair in shown), source])


def _shown(source: str, target: str) -> str:
    return f"{source} {target}"
