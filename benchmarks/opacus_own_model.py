"""Trains the CNN of examples/own_model.py on the same digits by Opacus, written as in its documentation.

python benchmarks/opacus_own_model.py        (python -m benchmarks.opacus_side_by_side compares both scripts)
"""

import warnings

import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")

images, labels = load_digits(return_X_y=True)
x = torch.tensor(images / 8 - 1, dtype=torch.float32).view(-1, 1, 8, 8)
y = torch.tensor(labels)
held_out = torch.arange(len(x)) % 5 == 0

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(128, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
data = TensorDataset(x[~held_out], y[~held_out])
EPOCHS = 30
engine = PrivacyEngine()
private, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=256),
    target_epsilon=8,
    target_delta=1e-5,
    epochs=EPOCHS,
    max_grad_norm=1.0,
)

for _ in range(EPOCHS):
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=128, optimizer=optimizer) as batches:
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(private(images), labels).backward()
            optimizer.step()

accuracy = (private(x[held_out]).argmax(1) == y[held_out]).float().mean()
print(f"epsilon {engine.get_epsilon(1e-5):.3f}, accuracy {accuracy:.3f}")
