"""Two processes with parts of every tensor equal one: the same steps in every mode, with no more messages than said."""

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks.messages import Messages
from groupwise.clipping.groups import MOST_TOGETHER, close_together
from groupwise.clipping.parts import Parts
from groupwise.config.schema import OptimConfig
from groupwise.planner.parts import foretell
from groupwise.tensor.cutting import CutModel
from groupwise.training.checkpoint import load_checkpoint
from groupwise.training.ranks import Alone, Ranks
from tests.few_orders import few_orders
from tests.pipeline.ranks import run_ranks
from tests.tensor.tiny import BATCHES, LENGTH, MODES, TokensTask, build, make_model, parameters, steps

WIDTH, BLOCKS, HEADS = 8, 2, 2
FORETOLD = {"ghost": "ghost"}

ADAM = OptimConfig(name="adam", learning_rate=0.01)
CASES = [(mode, "gpt2") for mode in ("adaptive_layer", "fixed_layer", "flat", "ghost")] + [
    ("adaptive_layer", "llama"),
    ("flat", "roberta"),
]
MORE = [(mode, "gpt2") for mode in ("adaptive_block", "adaptive_flat", "none")] + [
    ("adaptive_layer", "gpt2 untied"),
    ("ghost", "llama"),
    ("adaptive_layer", "roberta"),
]
"""Those that take their turn with the slow tests."""
MESSAGES = ("adaptive_layer", "fixed_layer", "adaptive_block", "flat", "ghost", "per_device", "none")
"""`adaptive_flat`, whose groups are those of `flat`, takes its turn with the slow tests."""
STEPS = 10
"""Without examples, of which noise is taken. A tensor's parts have at least 12 entries each: one stream for both has a
correlation of √120 standard deviations or more."""
RESUMED = ("adaptive_layer", "per_device")
SENSITIVE = ("fixed_layer", "flat", "ghost")
WEIGHTED = ("fixed_layer", "adaptive_block", "flat")
C = 1.0


def outcome(mode, kind, ranks):
    """Weights, thresholds and reports after all steps; and what the first, which has microbatches of 3, 3 and 1, and
    the second, an empty one, have sent."""
    trainer = build(mode, ranks, kind)
    sent, reports = [], []
    for step in (0, 1):
        with Messages() as messages:
            parts = trainer.step(step)
        sent.append(messages.seen)
        reports.append(trainer.report(ranks.agree(*parts)))
    reports += steps(trainer, 2)
    return parameters(trainer), trainer.named_thresholds(), reports, sent


def _messages(ranks, mode):
    """What the first two steps send."""
    trainer, found = build(mode, ranks), []
    for step in (0, 1):
        with Messages() as messages:
            trainer.step(step)
        found.append(messages.seen)
    return found


def _together(ranks):
    """The outcome where groups close together, as on a GPU, and the messages of the first step."""
    trainer = build("fixed_layer", ranks)
    close_together(trainer.engine.groups, MOST_TOGETHER)
    with Messages() as messages:
        trainer.step(0)
    for step in (1, 2):
        trainer.step(step)
    return parameters(trainer), messages.seen


def _local(trainer):
    return {name: p.detach().clone() for name, p in trainer.task.model.named_parameters()}


def _whole(trainer):
    return {name: tensor.clone() for name, tensor in trainer.cut.whole_model().items()}


def _noises(ranks, mode="fixed_layer", change=lambda trainer: None, count=STEPS):
    """What each step without examples moved every parameter by, in units of 0.5/8: {name: (count, n)}."""
    trainer = build(mode, ranks, sigma=1.0, batches=[[]] * count)
    change(trainer)
    places = [_local(trainer)]
    for step in range(count):
        trainer.step(step)
        places.append(_local(trainer))
    return {name: torch.stack([p[name].flatten() for p in places]).diff(dim=0) / (0.5 / 8) for name in places[0]}


def _noise_norm(ranks, mode):
    return steps(build(mode, ranks, sigma=1.0, batches=[[]], allocation="weighted"))[0]["noise_norm"]


def _one_stream(trainer):
    trainer.mechanism.gradient_noise = trainer.noise


def _sums_alone(ranks, mode, change=lambda parts: parts):
    """What single examples' whole clipped sums are, {name: tensor} each, on the first process."""
    trainer, found = build(mode, ranks, batches=[[0], [1]], optim=OptimConfig(learning_rate=8.0)), []
    for group in trainer.engine.groups:
        if group.parts is not None:
            group.parts = change(group.parts)
    places = [_whole(trainer)]
    for step in (0, 1):
        trainer.step(step)
        places.append(_whole(trainer))
    for before, after in pairwise(places):
        found.append({name: before[name] - after[name] for name in before if name != "lm_head.weight"})
    return found


def _not_added_up(parts):
    """A planted bug: each process clips its part by the part's own norm."""
    return Parts(parts.cut, parts.copies, parts.sizes, lambda squares: None)


def _resumed(ranks, mode, folder):
    """State after all steps in one go, and with a checkpoint after the first; and the weights as they were written."""
    whole, first, second = (build(mode, ranks, sigma=1.0, optim=ADAM, dropout=0.2) for _ in range(3))
    steps(whole)
    first.step(0)
    with patch.object(CutModel, "whole_model", autospec=True, side_effect=CutModel.whole_model) as gathered:
        first.save(folder / mode, {"step": 1})
    assert gathered.call_count == 1
    ranks.barrier()
    second.load(folder / mode, load_checkpoint(folder / mode), 1)
    steps(second, 1)
    second.save_model(folder / f"{mode}.pt")
    ranks.barrier()
    return [(_local(t), t.named_thresholds()) for t in (whole, second)], parameters(whole)


def _steps_per_device(ranks):
    """Weights and thresholds after one step; what it and the empty one after it send."""
    trainer, sent = build("per_device", ranks), []
    with Messages() as messages:
        trainer.step(0)
    sent.append(messages.seen)
    found = trainer.state_dict()["model"], trainer.named_thresholds()
    with Messages() as messages:
        trainer.step(1)
    return *found, [*sent, messages.seen]


def _masks(ranks):
    """What is drawn inside the attention of both blocks, and behind it, in two microbatches."""
    trainer = build("flat", ranks, dropout=0.5)
    found = []
    for block in trainer.task.model.transformer.h:
        block.attn.c_attn.register_forward_hook(lambda *_: found.append(torch.rand(20)))
        block.attn.resid_dropout.register_forward_hook(lambda *_: found.append(torch.rand(20)))
    for start in (0, 3):
        with trainer.mechanism.microbatch(0, start):
            trainer.task.losses([0, 1, 2])
    return found


def _on_two(rank, world, folder):
    with few_orders(Path(folder) / f"cache-{rank}"):
        return _found(Ranks(parts=2), Path(folder))


def _found(ranks, folder):
    outcomes = {case: outcome(*case, ranks) for case in CASES}
    per_device = _steps_per_device(ranks)
    sent = {mode: told[-1] for (mode, kind), told in outcomes.items() if kind == "gpt2"}
    sent["per_device"] = per_device[-1]
    return {
        "outcomes": outcomes,
        "per device": per_device,
        "messages": sent | {mode: _messages(ranks, mode) for mode in MESSAGES if mode not in sent},
        "together": _together(ranks),
        "noises": _noises(ranks),
        "one stream": _noises(ranks, change=_one_stream),
        "device noises": _noises(ranks, "per_device", count=1),  # then thresholds move
        "alone": {mode: _sums_alone(ranks, mode) for mode in SENSITIVE},
        "planted": {mode: _sums_alone(ranks, mode, _not_added_up) for mode in SENSITIVE},
        "resumed": {mode: _resumed(ranks, mode, folder) for mode in RESUMED},
        "masks": _masks(ranks),
        "masks rows": build("flat", ranks).engine.masks_rows,
        "noise norms": {mode: _noise_norm(ranks, mode) for mode in WEIGHTED},
    }


def _more_on_two(rank, world):
    ranks = Ranks(parts=2)
    return {"outcomes": {case: outcome(*case, ranks) for case in MORE}}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_ranks(_on_two, 2, str(tmp_path_factory.mktemp("two")))


@pytest.fixture(scope="module")
def more():
    return run_ranks(_more_on_two, 2)


@pytest.mark.parametrize("case", CASES, ids=" of ".join)
def test_two_processes_are_one(two, case):
    equals_one(two, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=" of ".join)
def test_two_processes_are_one_in_other_modes_too(more, case):
    equals_one(more, case)


def equals_one(two, case):
    weights, thresholds, reports, _ = outcome(*case, Alone())
    clipped = [report.get("nonprivate/clipped", 0.5) for report in reports if report["nonprivate/batch_size"]]
    assert any(0 < share <= 1 for share in clipped)
    torch.testing.assert_close(two[0]["outcomes"][case][0], weights, rtol=1e-9, atol=1e-12)
    for process in two:
        _, there, told, _ = process["outcomes"][case]
        assert there == pytest.approx(thresholds, rel=1e-12)
        for found, expected in zip(told, reports, strict=True):
            assert found == pytest.approx(expected, rel=1e-9)


def test_processes_are_equal_bit_for_bit_in_what_they_both_have(two):
    for mode in RESUMED:
        (first, _), (second, _) = (process["resumed"][mode][0][0] for process in two)
        both = [name for name in first if name.partition(".")[2].startswith(("wpe", "ln_f")) or ".ln_" in name]
        assert len(both) == 1 + 2 * (2 * BLOCKS + 1)
        assert all(torch.equal(first[name], second[name]) for name in both)


# -- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MESSAGES)
def test_messages_are_those_of_the_model_and_one_small_one_for_each_group(two, mode):
    """8 bytes an example for each group that is cut; nothing for clipping where a part is a group of its own."""
    messages_are_as_foretold([process["messages"][mode] for process in two], mode)


@pytest.mark.slow
def test_so_are_those_of_other_modes(more):
    (mode,) = MODES.keys() - MESSAGES
    messages_are_as_foretold([process["outcomes"][mode, "gpt2"][-1] for process in more], mode)


def messages_are_as_foretold(processes, mode):
    cut_groups = {"layer": 4 * BLOCKS + 1, "block": BLOCKS + 1, "flat": 1, "device": 0, "none": 0}
    clip = MODES[mode]
    backward = 2 if clip.norms == "ghost" else 1
    expected = Counter()
    for rows in (3, 3, 1):
        activations = 8 * rows * LENGTH * WIDTH  # of the embedding and each half block; of each half block and the head
        expected["allreduce", activations] += (2 * BLOCKS + 1) * (1 + backward)
        expected["allreduce", 8 * rows * (LENGTH - 1)] += 1  # the largest logit
        expected["allreduce", 2 * 8 * rows * (LENGTH - 1)] += 1
        expected["allreduce", 8 * rows] += cut_groups[clip.grouping]
    copied = (2 * BLOCKS + 1) * 2 * WIDTH + LENGTH * WIDTH
    groups = {"layer": 6 * BLOCKS + 3, "block": BLOCKS + 3, "flat": 1}.get(clip.grouping, 0)
    released = Counter({("broadcast", 8 * (copied + groups)): 1})
    for first, empty in processes:
        assert first == +expected + released
        assert empty == released
    foretold = foretell(make_model("gpt2"), 2, FORETOLD.get(mode, clip.grouping), [3, 3, 1], LENGTH)
    sums = Counter({("allreduce", size): often for size, often in (foretold.activations + foretold.norms).items()})
    assert sums == +expected and Counter({("broadcast", s): n for s, n in foretold.released.items()}) == released


def test_one_of_several_processes_cannot_begin_a_batch_again_by_itself(two):
    assert all(process["masks rows"] for process in two) and not build("flat", Alone()).engine.masks_rows


def test_groups_that_close_together_send_their_norms_together(two):
    weights, messages = two[0]["together"]
    torch.testing.assert_close(weights, two[0]["outcomes"]["fixed_layer", "gpt2"][0], rtol=1e-9, atol=1e-12)
    cut_groups = 4 * BLOCKS + 1
    assert messages["allreduce", 8 * 3 * cut_groups] == 2 and messages["allreduce", 8 * cut_groups] == 1


# -- the privacy argument ---------------------------------------------------------------------------------------------


def group_norms(sums, partition):
    """‖·‖ of a whole sum in each group of layers."""
    return torch.stack(
        [
            torch.cat([v.flatten() for name, v in sums.items() if name.rpartition(".")[0] in group.layers]).norm()
            for group in partition
        ]
    )


def exceeded(sums, mode):
    """By what factor single examples exceed the thresholds of their groups, at most."""
    partition = build(mode, Alone()).engine.partition
    threshold = C / math.sqrt(len(partition))
    return max(float(group_norms(example, partition).max()) / threshold for example in sums)


@pytest.mark.parametrize("mode", SENSITIVE)
def test_one_example_moves_no_group_by_more_than_its_threshold(two, mode):
    assert exceeded(two[0]["alone"][mode], mode) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("mode", SENSITIVE)
def test_norms_that_are_not_added_up_are_caught(two, mode):
    assert exceeded(two[0]["planted"][mode], mode) > 1.2  # √2 at most


def first_part(name, tensor):
    """What the first of two processes owns of a tensor: by hand, 1 and 0."""
    mask = torch.ones_like(tensor)
    if "wte" in name:
        mask[12:] = 0  # of 23 words
    elif "c_attn" in name:
        mask[..., [j for j in range(3 * WIDTH) if j % WIDTH >= WIDTH // HEADS]] = 0  # the second head's q, k and v
    elif "c_fc" in name:
        mask[..., 2 * WIDTH :] = 0
    elif name.endswith("c_proj.weight"):
        mask[len(tensor) // 2 :] = 0
    return mask


def test_per_device_is_a_loop_over_examples_whose_parts_are_clipped_apart(two):
    task, clip, batch = TokensTask(), MODES["per_device"], BATCHES[0]
    named = dict(task.model.named_parameters())
    masks = {name: first_part(name, p.detach()) for name, p in named.items()}
    sums, threshold = {name: torch.zeros_like(p) for name, p in named.items()}, C / math.sqrt(2)
    within = [0, 0]
    for example in batch:
        gradients = torch.autograd.grad(task.losses([example])[0], list(named.values()))
        for part in (0, 1):
            own = [g * (m if part == 0 else 1 - m) for g, m in zip(gradients, masks.values(), strict=True)]
            norm = torch.cat([g.flatten() for g in own]).norm()
            within[part] += int(norm <= threshold)
            for name, g in zip(named, own, strict=True):
                sums[name] += g * min(1.0, threshold / float(norm))
    weights = two[0]["per device"][0]
    for name, parameter in named.items():
        torch.testing.assert_close(weights[name], parameter.detach() - 0.5 / 8 * sums[name], rtol=1e-9, atol=1e-12)
    below = [(count - len(batch) / 2) / 8 + 0.5 for count in within]
    moved = [threshold * math.exp(-clip.quantile_learning_rate * (b - clip.target_quantile)) for b in below]
    for process in two:
        assert list(process["per device"][1].values()) == pytest.approx(moved, rel=1e-12)


def whole_noise(processes, unit):
    """The union of what both processes added, each coordinate once, in units of its standard deviation."""
    first, second = processes
    cut = [name for name in first if name.rpartition(".")[0].endswith(("wte", "c_attn", "c_fc", "c_proj"))]
    cut = [name for name in cut if not name.endswith("c_proj.bias")]
    return torch.cat([*first.values(), *(second[name] for name in cut)], dim=1) / unit, cut


def chi_square(noise):
    """The sum of squares of n standard normals, as a number of its own standard deviations from n."""
    return float(noise.square().sum() - noise.numel()) / math.sqrt(2 * noise.numel())


def correlation(processes, name):
    """Of what two processes add to their parts of a tensor, in standard deviations."""
    entries = min(process[name].shape[1] for process in processes)
    a, b = (process[name][:, :entries].flatten() / C for process in processes)
    return float((a * b).sum()) / math.sqrt(a.numel())


def test_the_noise_is_one_on_every_coordinate_and_independent_between_parts(two):
    noises = [process["noises"] for process in two]
    noise, cut = whole_noise(noises, C)
    assert noise.shape[1] == sum(p.numel() for p in make_model("gpt2").parameters())
    assert abs(chi_square(noise)) < 5 and abs(float(noise.sum())) < 5 * math.sqrt(noise.numel())
    assert all(abs(correlation(noises, name)) < 5 for name in cut)
    for name in noises[0].keys() - set(cut):
        alike = not name.endswith("c_proj.bias")
        assert torch.equal(noises[1][name], noises[0][name] if alike else torch.zeros_like(noises[0][name]))


@pytest.mark.parametrize("mode", WEIGHTED)
def test_noise_by_the_sizes_of_groups_is_by_those_of_whole_groups(two, mode):
    for process in two:
        assert process["noise norms"][mode] == pytest.approx(_noise_norm(Alone(), mode), rel=1e-12)


def test_parts_that_draw_from_one_stream_are_caught(two):
    noises = [process["one stream"] for process in two]
    assert correlation(noises, "transformer.wte.weight") > 20


def test_per_device_noise_is_that_of_two_groups(two):
    """σ_new·√K·C_k, where C_k = C/√K in the first step."""
    noise, _ = whole_noise([process["device noises"] for process in two], C / math.sqrt(0.9))
    assert abs(chi_square(noise)) < 5


def test_masks_of_parts_are_their_own_inside_and_the_same_behind(two):
    first, second = (process["masks"] for process in two)
    inside = [*first[::2], *second[::2]]
    assert len(inside) == 2 * 2 * BLOCKS
    assert all(not torch.equal(a, b) for i, a in enumerate(inside) for b in inside[:i])
    assert all(torch.equal(a, b) for a, b in zip(first[1::2], second[1::2], strict=True))


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", RESUMED)
def test_a_checkpoint_goes_on_where_it_was_and_the_weights_are_whole(two, mode, tmp_path_factory):
    for process in two:
        (whole, thresholds), (resumed, others) = process["resumed"][mode][0]
        assert all(torch.equal(whole[name], resumed[name]) for name in whole) and thresholds == others
    if mode == "per_device":
        assert len(set(thresholds.values())) == 2  # counts were noised apart
    plain = make_model("gpt2")
    files = list(tmp_path_factory.getbasetemp().glob(f"two*/{mode}.pt"))
    plain.load_state_dict(load_checkpoint(files[0]))
    assert torch.equal(torch.cat([v.flatten() for v in plain.state_dict().values()]), two[0]["resumed"][mode][1])
