"""Trains a small network privately in a Lightning module with manual optimisation.

    python examples/lightning_loop.py        2,000 points at ε = 8, in seconds

`training_step` takes one private step, which draws its own batch, so the loader only counts steps. The private step
runs the backward pass and the optimiser: `manual_backward` and `self.optimizers().step()` are not used.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import groupwise
from groupwise.torchvision_import import import_torchvision

import_torchvision()  # lightning asks for it, also where it is built for another torch
import lightning  # noqa: E402


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """A network and its private training."""

    def __init__(self, train: TensorDataset) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.train_data = train
        self.network = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))

    def configure_optimizers(self) -> None:
        """Begin the private training, once the network is on its device; Lightning gets no optimiser to step."""
        optimizer = torch.optim.SGD(self.network.parameters(), lr=1.0)
        self.private = groupwise.make_private(
            self.network, optimizer, self.train_data, self.losses, epsilon=8, delta=1e-5, epochs=5, batch_size=200
        )

    def losses(self, network: nn.Module, batch: list[Tensor]) -> Tensor:
        """One loss for each example, (b,)."""
        inputs, labels = (tensor.to(self.device) for tensor in batch)
        return F.cross_entropy(network(inputs), labels, reduction="none")

    def training_step(self, turn: int) -> None:
        """One step of the plan."""
        self.private.step()

    def on_train_epoch_end(self) -> None:
        """Log the ε spent so far."""
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
