# %% [markdown]
# # Attacks: audit a setting, plant a bug, see it caught
#
# (ε, δ) is a promise about the worst attacker. Here we are that attacker, and bound ε from below by what we can do. A bound below
# the claim proves nothing; **a bound above the claim would refute it**. This notebook needs a checkout of the project.

# %%
import subprocess
import sys
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import groupwise
from groupwise.audit import two_worlds_epsilon
from groupwise.training import private_step

# %% [markdown]
# ## Audit a setting with one command
# Four thousand canaries, each with a gradient direction of its own, are put into one real training run or left out by the toss of
# a coin. An attacker who sees the release guesses which are in (Steinke, Nasr and Jagielski, 2023).

# %%
for words in ("clip=adaptive_layer privacy.epsilon=8", "clip=flat privacy.epsilon=1"):
    command = [sys.executable, "-m", "groupwise.audit", *words.split()]
    print(f"$ python -m groupwise.audit {words}")
    print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

# %% [markdown]
# ## Two worlds
# The same attack by hand. In one world Alice's example is in the data, in the other it is not (her row is zero, which has no gradient).
# The loss is linear and the batch is everybody, so one step at learning rate 1 releases the sum of clipped gradients plus noise, and
# each step is a new play of the same game. The attacker looks along Alice's gradient.

# %%
PLAYS, DELTA = 1000, 1e-3


def losses(model, batch):
    """Linear, (b,): the gradient of an example is the example, whatever the weights are."""
    return model(batch[0]).squeeze(1)


def play(with_alice, rows=1):
    """One number per play: the released sum along Alice's gradient; and the ε that is claimed for one play."""
    alice = torch.tensor([5.0, 0.0]) if with_alice else torch.zeros(2)
    data = [(torch.zeros(2),), *[(alice,)] * rows]
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = groupwise.make_private(
        model,
        optimizer,
        data,
        losses,
        noise_multiplier=2.0,
        delta=DELTA,
        steps=PLAYS,
        batch_size=len(data),
        clip="flat",
    )
    found, before = [], model.weight.detach().clone()
    for _ in private.steps():
        found.append(len(data) * float((before - model.weight.detach())[0, 0]))
        before = model.weight.detach().clone()
    return np.array(found), private.plan.spent_epsilon(1)


def show(title, rows=1):
    """Play both worlds, draw what was released, and say what the attacker can prove."""
    (without, claimed), (having, _) = play(False, rows), play(True, rows)
    proven = two_worlds_epsilon(without, having, DELTA)
    _, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
    axes.hist([without, having], bins=40, label=["without Alice", "with Alice"], color=["#999999", "#d55e00"])
    verdict = "REFUTED" if proven > claimed else "not refuted"
    axes.set(title=f"{title}: claimed ε = {claimed:.2f}, proven ε ≥ {proven:.2f}: {verdict}", xlabel="released")
    axes.legend()
    plt.show()


# %%
show("as it is")

# %% [markdown]
# Her gradient has norm 5 and is clipped to 1, so the two histograms overlap as much as σ = 2 promises.
#
# ## Plant a bug
# First, noise that is three times too small (a wrong sensitivity, a batch size in the wrong place: bugs of this kind were found in
# real libraries). The accounting still claims the same ε.

# %%
right = private_step.release_gradients


def too_little(*given, noise_multiplier, **settings):
    """A third of the noise."""
    return right(*given, noise_multiplier=noise_multiplier / 3, **settings)


with patch.object(private_step, "release_gradients", too_little):
    show("a third of the noise")

# %% [markdown]
# ## One person, several rows
# ε is a promise for one *example*. If Alice has three rows, each is clipped by itself, and the attacker sees three times as much of
# her as the ε of one example allows. No check can notice this: put all of a person's data into one example.

# %%
show("three rows of Alice", rows=3)

# %% [markdown]
# ## What is refused before training
# A loss that mixes examples would let Alice move the clipped gradients of others. The check before training finds it.


# %%
def mixing(model, batch):
    """Each loss is relative to the batch's mean, in which Alice has a part."""
    own = losses(model, batch).square()
    return own - own.mean()


model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
data = [(torch.randn(2),) for _ in range(50)]
try:
    groupwise.make_private(model, optimizer, data, mixing, epsilon=1, steps=10, batch_size=10)
except ValueError as error:
    print(error)

# %% [markdown]
# More: [what was tried against the claim](../docs/trust.md), planted bugs included, and `python -m groupwise.audit --help`.
