"""Trains a small network privately in a Lightning module of manual optimisation.

    python examples/lightning_loop.py        2,000 points at ε = 8, in seconds

A turn of Lightning's loop is one step of the plan: `training_step` draws its batch from `private.batches`, so the
loader has only to count. `manual_backward` and `self.optimizers().step()` have no place here, and are refused.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import groupwise
from groupwise.torchvision_import import import_torchvision

import_torchvision()  # lightning asks for it, also where it is built for another torch
import lightning  # noqa: E402


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """A network and the private training of it."""

    def __init__(self, train: TensorDataset) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.train_data = train
        self.network = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))

    def configure_optimizers(self) -> None:
        """No optimiser that Lightning would step; here the network is on its device, and becomes private."""
        optimizer = torch.optim.SGD(self.network.parameters(), lr=1.0)
        self.private = groupwise.make_private(
            self.network, optimizer, self.train_data, epsilon=8, delta=1e-5, epochs=5, batch_size=200
        )

    def training_step(self, turn: int) -> None:
        """One step of the plan."""
        for inputs, labels in self.private.batches(microbatch=100, steps=1):
            logits = self.network(inputs.to(self.device))
            self.private.backward(F.cross_entropy(logits, labels.to(self.device), reduction="none"))
            self.private.step()

    def on_train_epoch_end(self) -> None:
        """ε, of the steps that were executed."""
        self.log("epsilon", self.private.epsilon, prog_bar=True)


lightning.seed_everything(0)
x = torch.randn(2400, 20)
y = (x[:, 0] + x[:, 1] > 0).long()
model = Classifier(TensorDataset(x[:2000], y[:2000]))
lightning.Trainer(max_epochs=5, logger=False, enable_checkpointing=False, devices=1).fit(model, range(2000 // 200))
with torch.no_grad():
    right = model.network(x[2000:]).argmax(1) == y[2000:]
print(model.private.statement())
print(f"epsilon {model.private.epsilon:.3f}, accuracy {right.float().mean():.3f}")
