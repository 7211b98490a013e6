# %% [markdown]
# # A first private model
#
# A small CNN learns scikit-learn's digits with differential privacy: 1,437 training images at ε = 8. It takes a quarter of a
# minute on one core and needs no network (`pip install -e '.[suite,language,dev]'` in a checkout, or `make env`).
#
# The noise is secret and fresh in every run, so your numbers differ a little from those below.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import groupwise

# %% [markdown]
# ## Data and model
# Pixels have the known range 0 to 16, so dividing by 8 uses no statistic of the training set. **A mean, a fitted scaler or a
# vocabulary that is computed from private data is a release of its own**, which no ε here covers.

# %%
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8)
y = torch.tensor(labels)
held_out = torch.arange(len(x)) % 5 == 0
data = TensorDataset(x[~held_out], y[~held_out])


def make_model() -> nn.Module:
    """A CNN with GroupNorm: BatchNorm mixes the examples of a batch, and is refused."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


len(data), sum(p.numel() for p in make_model().parameters())

# %% [markdown]
# ## One loss per example
# You write this one function. It returns one loss for each example of the batch, never their mean.


# %%
def losses(model, batch):
    """Cross-entropies, (b,)."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")


# %% [markdown]
# ## Make the training private
# You give the budget (ε, δ), the number of epochs and the batch size; the noise multiplier σ follows. Before the first step a few
# examples are traced through the model, and their clipped gradients are compared with a loop over single examples.

# %%
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
private = groupwise.make_private(model, optimizer, data, losses, epsilon=8, delta=1e-5, epochs=30, batch_size=256)
print(private.statement())

# %% [markdown]
# ## Train
# Each iteration of the loop is one private step: a Poisson batch is drawn, each example's gradient is clipped in groups (here
# one group per layer), noise is added once, and the model is updated. Between steps the model is a plain model, so schedulers
# and evaluation go into the loop.


# %%
def accuracy(model):
    """On the held-out images."""
    with torch.no_grad():
        return (model(x[held_out]).argmax(1) == y[held_out]).double().mean().item()


steps = private.steps()
print(len(steps), "steps")
history = []
for step in steps:
    if step.number % 5 == 0:
        history.append(
            {"step": step.number, "epsilon": step.epsilon, "accuracy": accuracy(model), **private.thresholds}
        )
print(f"accuracy {accuracy(model):.3f} at epsilon {private.epsilon:.3f}")

# %% [markdown]
# ## What was spent, and what was learnt
# ε grows fast at first, and then like √t. `step.epsilon` is the ε of the steps so far. If you stop early because of results,
# quote the plan's ε all the same.

# %%
table = pd.DataFrame(history).set_index("step")
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(table.index, table.epsilon, "o-", color="#0072b2")
left.set(xlabel="step", ylabel="ε spent (δ = 1e-5)", ylim=(0, None))
right.plot(table.index, table.accuracy, "s-", color="#d55e00")
right.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
plt.show()

# %% [markdown]
# ## Thresholds that adapt
# Each layer's threshold follows a private quantile of its gradient norms. This costs a small share r of the budget, which the
# plan includes. Thresholds are rescaled so that together they clip at C = 1. They depend on the data through noisy counts only,
# so they may be published.

# %%
axes = table.drop(columns=["epsilon", "accuracy"]).plot(logy=True, figsize=(8, 3.2))
axes.set(xlabel="step", ylabel="threshold of the group")
axes.legend(title="layer", loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# ## How much does it cost?
# The same training at other budgets, and without privacy (ε = ∞: full gradients, shuffled batches). Each of these models has its
# own ε. If you publish several of them, their ε add up.

# %%
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for _ in range(30):
    for batch in DataLoader(data, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        losses(model, batch).mean().backward()
        optimizer.step()
rows = [{"epsilon": float("inf"), "sigma": 0.0, "accuracy": accuracy(model)}]
for epsilon in (8, 4, 2, 1):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    private = groupwise.make_private(
        model, optimizer, data, losses, epsilon=epsilon, delta=1e-5, epochs=30, batch_size=256
    )
    for _ in private.steps():
        pass
    rows.append({"epsilon": epsilon, "sigma": private.plan.noise_multiplier, "accuracy": accuracy(model)})
pd.DataFrame(rows).round(3)

# %% [markdown]
# ## Save and resume
# `private.save(file)` keeps what a resumed training needs, the secret noise key too. To resume, make the same training again and
# load the file before its first step.

# %%
folder = Path(tempfile.mkdtemp())


def begin():
    """A model and its private training, before the first step."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    return model, groupwise.make_private(
        model, optimizer, data, losses, epsilon=8, delta=1e-5, epochs=30, batch_size=256
    )


model, private = begin()
for _ in private.steps(100):  # the program ends here, say
    pass
private.save(folder / "training.pt")

model, private = begin()
private.load(folder / "training.pt")
for _ in private.steps():  # the steps that are left
    pass
print(private)
print(f"accuracy {accuracy(model):.3f}")

# %% [markdown]
# After training delete that file: whoever has the key can remove the noise. Publish only the model and the statement of the
# guarantee.

# %%
(folder / "training.pt").unlink()
torch.save(model.state_dict(), folder / "model.pt")
print(private.statement())

# %% [markdown]
# Next: [coming from Opacus](from_opacus.ipynb), [texts](text_classification.ipynb), [tables](tabular.ipynb),
# [attacks](attacks.ipynb), and [what is guaranteed and what is not](../docs/privacy.md).
