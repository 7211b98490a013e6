# %% [markdown]
# # Tabular data
#
# Logistic regression and a small network on scikit-learn's breast-cancer table: 469 patients, 30 measurements each. Private
# training on so few examples is hard, so every choice shows in the result.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import TensorDataset

import groupwise

frame, target = load_breast_cancer(return_X_y=True, as_frame=True)
frame.iloc[:3, :5]

# %% [markdown]
# ## Preprocessing is part of the mechanism
# `StandardScaler().fit(x)` reads the mean and the standard deviation of the private data. The weights would then depend on
# them without noise, and **no ε would hold**. The same goes for imputed means, quantile bins, vocabularies, feature selection
# and class weights counted from the labels. Well-known constants are allowed, and so are statistics of public data.
#
# Here the logarithm brings lengths and areas to a similar range; the constants are chosen without looking at the table.

# %%
x = torch.tensor(np.log(0.01 + frame.to_numpy()), dtype=torch.float32)
y = torch.tensor(target.to_numpy())
train = TensorDataset(x[100:], y[100:])
N = len(train)
N, x.min().item(), x.max().item()

# %% [markdown]
# ## The noise, before any training
# The noise for an (ε, δ) depends only on N, the batch size and the number of steps, so looking at it costs no privacy.
# `python -m groupwise.privacy epsilon=8 delta=1e-4 n=469 batch=128 epochs=40` prints the same.

# %%
from groupwise.privacy import make_plan

costs = [
    {"batch": batch, "epsilon": epsilon, "sigma / batch": plan.noise_multiplier / batch}
    for batch in (32, 64, 128, 256, 469)
    for epsilon in (1, 3, 8)
    for plan in [
        make_plan(dataset_size=N, expected_batch_size=batch, steps=round(40 * N / batch), delta=1e-4, epsilon=epsilon)
    ]
]
pd.DataFrame(costs).pivot(index="batch", columns="epsilon", values="sigma / batch").round(4)

# %% [markdown]
# The noise of a step relative to its batch falls with the batch size: large batches are better if there is time for them.
#
# ## Train


# %%
def losses(model, batch):
    """Cross-entropies, (b,)."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make(kind):
    """A logistic regression, or a network with one hidden layer."""
    torch.manual_seed(0)
    if kind == "logistic":
        return nn.Linear(30, 2)
    return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))


def reached(kind, epsilon, seeds=3):
    """Mean accuracy on the 100 held-out patients over some runs."""
    found = []
    for _ in range(seeds):
        model = make(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        private = groupwise.make_private(
            model, optimizer, train, losses, epsilon=epsilon, delta=1e-4, epochs=40, batch_size=128
        )
        for _ in private.steps():
            pass
        with torch.no_grad():
            found.append((model(x[:100]).argmax(1) == y[:100]).double().mean().item())
    return float(np.mean(found))


rows = [
    {"model": kind, "epsilon": epsilon, "accuracy": reached(kind, epsilon)}
    for kind in ("logistic", "network")
    for epsilon in (1, 3, 8)
]
table = pd.DataFrame(rows).pivot(index="epsilon", columns="model", values="accuracy").round(3)
table["always the more frequent class"] = round(1 - y[:100].double().mean().item(), 3)
table

# %%
axes = table.plot(marker="o", figsize=(6, 3), ylim=(0, 1), xlabel="ε (δ = 1e-4)", ylabel="accuracy, mean of three runs")
axes.legend(fontsize=8)
plt.show()

# %% [markdown]
# A smaller ε can come out ahead here: each number is the mean of three runs on 100 patients, so gaps of a few points are noise.
#
# Eighteen models were trained for this picture. If you *publish* the best of them, choosing it costs privacy too: see
# [the best of several runs](../docs/privacy.md#the-best-of-several-runs).
#
# ## The check before training
# A DataFrame, or columns in place of examples, is refused with a sentence that says what to give instead:

# %%
model = make("logistic")
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
try:
    groupwise.make_private(model, optimizer, frame, losses, epsilon=8, epochs=40, batch_size=128)
except ValueError as error:
    print(error)
