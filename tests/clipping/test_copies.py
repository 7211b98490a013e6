"""Copies and averages of a model in private training are ordinary models."""

import copy
import pickle

import torch
from torch.optim.swa_utils import AveragedModel

from tests.private_use import Use, X


def test_copies_and_averages_are_plain_models():
    use, plain = Use(), Use().train()
    average = AveragedModel(use.model)
    for _ in use.private.steps():
        average.update_parameters(use.model)
        for copied in (copy.deepcopy(use.model), pickle.loads(pickle.dumps(use.model))):
            copied(X).sum().backward()
            assert torch.equal(copied(X), use.model(X))
    Use(copy.deepcopy(average.module)).train()  # the average can be trained privately too
    assert not torch.equal(average(X), use.model(X))
    average.module.load_state_dict(use.model.state_dict())
    assert torch.equal(average(X), use.model(X))
    assert torch.equal(plain.weights, use.weights)
