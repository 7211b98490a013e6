"""Trains a small network privately with Accelerate, which places the model on its device.

    python examples/accelerate_loop.py        2,000 points at ε = 8, in seconds

The private step runs the backward pass and the optimiser, so `accelerator.backward` and `clip_grad_norm_` are not used.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import groupwise

torch.manual_seed(0)
x = torch.randn(2400, 20)
y = (x[:, 0] + x[:, 1] > 0).long()
train = TensorDataset(x[:2000], y[:2000])

accelerator = Accelerator()  # one process; mixed_precision="bf16" works too
network = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
model = accelerator.prepare(network)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)


def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """One loss for each example, (b,)."""
    inputs, labels = (tensor.to(accelerator.device) for tensor in batch)
    return F.cross_entropy(model(inputs), labels, reduction="none")


private = groupwise.make_private(model, optimizer, train, losses, epsilon=8, delta=1e-5, epochs=5, batch_size=200)
for _ in private.steps():
    pass

private.detach()
accelerator.wait_for_everyone()
with torch.no_grad():
    right = model(x[2000:].to(accelerator.device)).argmax(1).cpu() == y[2000:]
accelerator.print(private.statement())
accelerator.print(f"epsilon {private.epsilon:.3f}, accuracy {right.float().mean():.3f}")
