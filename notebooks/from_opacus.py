# %% [markdown]
# # Coming from Opacus
#
# The same network, data, budget and batch size, first with Opacus 1.6 and then with groupwise: what changes, and why.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import groupwise

images, labels = load_digits(return_X_y=True)
x = torch.tensor(images / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8)
y = torch.tensor(labels)
held_out = torch.arange(len(x)) % 5 == 0
data = TensorDataset(x[~held_out], y[~held_out])
EPOCHS, BATCH, EPSILON, DELTA, CLIP = 30, 256, 8, 1e-5, 1.0


def make_model():
    """With BatchNorm, which neither library can train privately."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


def accuracy(model):
    """On the held-out images."""
    model.eval()
    with torch.no_grad():
        return (model(x[held_out]).argmax(1) == y[held_out]).double().mean().item()


# %% [markdown]
# ## Layers that mix examples
# `ModuleValidator.fix(model)` becomes `groupwise.fix_model(model)`. Both replace BatchNorm by GroupNorm. groupwise changes the
# model in place and returns a list of sentences on what it changed; the learned scale and shift are kept.

# %%
theirs = ModuleValidator.fix(make_model())
ours = make_model()
for sentence in groupwise.fix_model(ours):
    print(sentence)

# %% [markdown]
# ## Opacus
# The engine wraps the model, the optimiser and the loader. The loop is yours: forward, mean loss, backward, step. Large batches need
# `BatchMemoryManager` around the loader.

# %%
optimizer = torch.optim.SGD(theirs.parameters(), lr=0.4, momentum=0.9)
loader = DataLoader(data, batch_size=BATCH)
engine = PrivacyEngine(accountant="prv")
theirs.train()
theirs, optimizer, loader = engine.make_private_with_epsilon(
    module=theirs,
    optimizer=optimizer,
    data_loader=loader,
    target_epsilon=EPSILON,
    target_delta=DELTA,
    epochs=EPOCHS,
    max_grad_norm=CLIP,
)
criterion = nn.CrossEntropyLoss()
for _ in range(EPOCHS):
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=128, optimizer=optimizer) as batches:
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = criterion(theirs(inputs), targets)
            loss.backward()
            optimizer.step()
rows = [
    {
        "library": "Opacus",
        "sigma": optimizer.noise_multiplier,
        "epsilon": engine.get_epsilon(DELTA),
        "accuracy": accuracy(theirs),
    }
]

# %% [markdown]
# ## groupwise
# One function gives one loss per example. One call makes the training private. Each iteration is one whole step. There
# is no `zero_grad`, no `backward` and no `optimizer.step()` that could be forgotten or called twice. The model stays a plain
# `nn.Module` (no `GradSampleModule`, no `_module.` in front of the names of its weights).


# %%
def losses(model, batch):
    """Cross-entropies, (b,): `reduction="none"` in place of the mean."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(model, **options):
    """Train with the settings of above; returns a row of the table."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    model.train()
    private = groupwise.make_private(
        model,
        optimizer,
        data,
        losses,
        epsilon=EPSILON,
        delta=DELTA,
        epochs=EPOCHS,
        batch_size=BATCH,
        microbatch=128,
        threshold=CLIP,
        **options,
    )
    for _ in private.steps():
        pass
    return {"sigma": private.plan.noise_multiplier, "epsilon": private.epsilon, "accuracy": accuracy(model)}


rows.append({"library": "groupwise, clip='flat' (as Opacus clips)", **train(ours, clip="flat")})
again = make_model()
groupwise.fix_model(again)
rows.append({"library": "groupwise, clip='adaptive_layer' (its default)", **train(again)})
table = pd.DataFrame(rows).round({"sigma": 3, "epsilon": 3, "accuracy": 3})
table

# %%
axes = table.plot.barh(x="library", y="accuracy", figsize=(7, 1.8), legend=False, xlim=(0, 1), color="#0072b2")
axes.set(ylabel="", xlabel="held-out accuracy, one run each")
axes.invert_yaxis()
plt.show()

# %% [markdown]
# Each row is one run on 360 held-out images, so gaps of a point or two between the accuracies are noise.
#
# σ differs a little because the batches do. Opacus samples with rate 1/`len(loader)`, here 1/6, which is 239 examples a step in 180
# steps. groupwise takes the 256 that were asked for, in 168 steps. For speed and memory of both see [benchmarks](../docs/benchmarks.md).
#
# ## Name by name
#
# | Opacus | groupwise | why |
# |---|---|---|
# | `PrivacyEngine().make_private_with_epsilon(…)` | `groupwise.make_private(…, epsilon=8)` | one call for ε, σ or a ready plan |
# | `make_private(noise_multiplier=…)` | `make_private(…, noise_multiplier=…)` | the same σ: noise σC, C the threshold |
# | `module`, `data_loader` | `model`, `data` | the dataset; a DataLoader's dataset is used, with a warning |
# | `target_epsilon`, `target_delta` | `epsilon`, `delta` | δ is N^-1.1 if it is not given |
# | `max_grad_norm` | `threshold` | for the whole gradient; each of K groups begins with C/√K |
# | `poisson_sampling=True` | nothing | always on: shuffled batches have no guarantee at this ε |
# | `BatchMemoryManager(max_physical_batch_size=…)` | `microbatch=…` | chosen to fit into memory, and halved if memory runs out |
# | `grad_sample_mode="ghost"` | `clip="ghost"` | or `"flat"`; per-layer clipping needs one backward pass |
# | `clipping="per_layer"`, `"adaptive"` | `clip="fixed_layer"`, `"adaptive_flat"`, `"adaptive_layer"` | adaptive thresholds are paid for in the same ε |
# | `criterion(…)`, a mean | `losses(model, batch)`, (b,) | the gradient of a mean cannot be clipped per example |
# | `engine.get_epsilon(δ)` | `private.epsilon`, `private.epsilon_at(δ)` | computed from the steps that were taken |
# | `ModuleValidator.validate` | done by `make_private` | on your data: the real gradients against a loop over single examples |
# | `ModuleValidator.fix` | `groupwise.fix_model` | in place, and it says what it changed |
# | `secure_mode=True` | `noise_source=NoiseSource.fresh(secure=True)` | noise from a cipher |
#
# An Opacus name is refused, with the name to use here:

# %%
try:
    groupwise.make_private(again, None, data, losses, target_epsilon=8, max_grad_norm=1.0)
except ValueError as error:
    print(error)
try:
    groupwise.PrivacyEngine()
except ImportError as error:
    print(error)
