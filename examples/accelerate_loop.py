"""Trains a small network privately in an Accelerate loop: Accelerate places the model, `make_private` does the rest.

    python examples/accelerate_loop.py        2,000 points at ε = 8, in seconds

`accelerator.backward`, `clip_grad_norm_` and the prepared optimiser's `step` have no place here, and are refused.
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
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
private = groupwise.make_private(model, optimizer, train, epsilon=8, delta=1e-5, epochs=5, batch_size=200)

for inputs, labels in private.batches(microbatch=100):
    logits = model(inputs.to(accelerator.device))
    private.backward(F.cross_entropy(logits, labels.to(accelerator.device), reduction="none"))
    private.step()

private.detach()
accelerator.wait_for_everyone()
with torch.no_grad():
    right = model(x[2000:].to(accelerator.device)).argmax(1).cpu() == y[2000:]
accelerator.print(private.statement())
accelerator.print(f"epsilon {private.epsilon:.3f}, accuracy {right.float().mean():.3f}")
