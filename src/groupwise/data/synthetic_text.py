"""Makes up small data sets from templates and a seed: no file, no network, no licence.

They stand in for the real ones in demonstrations and tests. Single words are hints to a label, and not more.
"""

import random

from groupwise.data.glue import GLUE
from groupwise.data.synthetic_examples import LABELLED, PAIRED, LabelledMaker, PairedMaker
from groupwise.data.text_examples import Labelled, LabelledText, PairedText, Request, Texts, sha256_of_examples
from groupwise.errors import UserError

TRAIN, VALID, REQUESTS = 2000, 200, 100
"""Training examples of each task, those of a validation set with labels, requests of a validation or test set."""
SOURCE = "made up by groupwise from templates (seed {})"


def synthetic_labelled(task: str, seed: int = 0) -> LabelledText:
    """Make up sst2, qnli, qqp or mnli: 2,000 training texts and 200 for each validation set, classes in equal shares.

    The same on every machine; no text is in two sets. MNLI's mismatched set comes from templates of its own.

    Raises:
        UserError: an unknown task.
    """
    if task not in LABELLED:
        raise UserError(f"task={task} has no made-up labelled texts; choose one of {', '.join(LABELLED)}.")
    makers = LABELLED[task]
    rng, seen, classes = random.Random(f"{task} {seed}"), set[Texts](), GLUE[task].classes
    train = _labelled(TRAIN, makers[""], len(classes), rng, seen)
    valid = {name: _labelled(VALID, make, len(classes), rng, seen) for name, make in makers.items()}
    content = [[part.texts, part.labels] for part in (train, *valid.values())]
    return LabelledText(train, valid, classes, SOURCE.format(seed), {f"synthetic/{task}": sha256_of_examples(content)})


def synthetic_paired(task: str, seed: int = 0) -> PairedText:
    """Make up e2e, dart or samsum: 2,000 training pairs, 100 requests for validation and 100 for testing.

    The sources have the form that files are brought into: linearised tables, instructed dialogues. The same on every
    machine; no source is in two sets. E2E has four references for a source, DART two and SAMSum one.

    Raises:
        UserError: an unknown task.
    """
    if task not in PAIRED:
        raise UserError(f"task={task} has no made-up pairs of texts; choose one of {', '.join(PAIRED)}.")
    make, rng, seen = PAIRED[task], random.Random(f"{task} {seed}"), set[str]()
    train: list[tuple[str, str]] = []
    while len(train) < TRAIN:
        request = _new_request(make, rng, seen)
        train += [(request.source, reference) for reference in request.references]
    rng.shuffle(train)
    valid = [_new_request(make, rng, seen) for _ in range(REQUESTS)]
    test = [_new_request(make, rng, seen) for _ in range(REQUESTS)]
    content = [train, *([[r.source, r.references] for r in part] for part in (valid, test))]
    return PairedText(train, valid, test, SOURCE.format(seed), {f"synthetic/{task}": sha256_of_examples(content)})


def _labelled(count: int, make: LabelledMaker, classes: int, rng: random.Random, seen: set[Texts]) -> Labelled:
    """`count` new examples, their labels in turn and then shuffled."""
    rows: list[tuple[Texts, int]] = []
    while len(rows) < count:
        label = len(rows) % classes
        texts = make(rng, label)
        if texts not in seen:
            seen.add(texts)
            rows.append((texts, label))
    rng.shuffle(rows)
    return Labelled([texts for texts, _ in rows], [label for _, label in rows])


def _new_request(make: PairedMaker, rng: random.Random, seen: set[str]) -> Request:
    while True:
        request = make(rng)
        if request.source not in seen:
            seen.add(request.source)
            return request
