"""A copy of a model in private training is a plain model."""

import copy
import pickle

import torch
from torch.optim.swa_utils import AveragedModel

from tests.private_use import Use, X


def test_copies_and_averages_of_a_model_in_private_training_are_plain_models():
    use, plain = Use(), Use().train()
    average = AveragedModel(use.model)
    for _ in use.private.steps():
        average.update_parameters(use.model)
        for twin in (copy.deepcopy(use.model), pickle.loads(pickle.dumps(use.model))):
            twin(X).sum().backward()
            assert torch.equal(twin(X), use.model(X))
    Use(copy.deepcopy(average.module)).train()  # it may train privately itself
    assert not torch.equal(average(X), use.model(X))
    average.module.load_state_dict(use.model.state_dict())
    assert torch.equal(average(X), use.model(X))
    assert torch.equal(plain.weights, use.weights)
