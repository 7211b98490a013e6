"""Differentially private deep learning with group-wise clipping, in PyTorch.

Train your own model (docs/loop.md, `help(groupwise.make_private)`)::

    def losses(model, batch):  # one loss per example, (b,), never their mean
        inputs, labels = batch
        return cross_entropy(model(inputs), labels, reduction="none")

    private = groupwise.make_private(model, optimizer, dataset, losses, epsilon=8, epochs=10, batch_size=512)
    for step in private.steps():  # len(private.steps()) is their number
        scheduler.step()
    print(private.statement())

    groupwise.fix_model(model)                                      replaces BatchNorm, and lists the changes
    groupwise.detach(model)                                         ends a private training of the model
    groupwise.gradient_norms(model, losses_of, rows)                norms of single examples, not private
    from groupwise.privacy import make_plan                         sigma for an epsilon, or the reverse
    from groupwise.integrations.transformers import PrivateTrainer  in place of transformers' Trainer

`groupwise.clipping` and `groupwise.privacy` are the two libraries that this is built on.
On the command line: `groupwise --help`, and `python run.py --help` in a checkout.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from groupwise.clipping import gradient_norms
    from groupwise.private import Private, detach, fix_model, make_private
    from groupwise.rows import load_runs

__version__ = "0.5.0"
__all__ = ["Private", "__version__", "detach", "fix_model", "gradient_norms", "load_runs", "make_private"]
_OWNERS = {
    **dict.fromkeys(("Private", "detach", "fix_model", "make_private"), "groupwise.private"),
    "gradient_norms": "groupwise.clipping",
    "load_runs": "groupwise.rows",
}
_INSTEAD = {
    **dict.fromkeys(("PrivacyEngine", "make_private_with_epsilon"), "groupwise.make_private(model, ..., epsilon=8)"),
    **dict.fromkeys(("ModuleValidator", "validators"), "groupwise.fix_model(model)"),
    "accountants": "groupwise.privacy.make_plan(...)",
    "BatchMemoryManager": "groupwise.make_private(..., microbatch=64)",
}
"""Opacus' names -> what to call here."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is used, so that importing the package does not import torch."""
    if name in _OWNERS:
        return getattr(import_module(_OWNERS[name]), name)
    if name in _INSTEAD:  # Python replaces the text of an AttributeError in `from groupwise import`
        raise ImportError(f"module 'groupwise' has no attribute {name!r}: use {_INSTEAD[name]}")
    raise AttributeError(f"module 'groupwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
