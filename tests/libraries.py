"""Imports what takes seconds, in the order that works, for the process that others are forked from."""

import gc

gc.disable()  # a million objects that stay are not looked through for garbage, neither here nor in the forks

from groupwise.torchvision_import import import_torchvision  # noqa: E402

import_torchvision()  # before transformers

import dp_accounting  # noqa: E402, F401
import hydra  # noqa: E402, F401
import peft  # noqa: E402, F401
import prv_accountant  # noqa: E402, F401
import scipy.stats  # noqa: E402, F401
import sklearn.datasets  # noqa: E402, F401
import torch._dynamo  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.pipelining  # noqa: E402, F401
import transformers.models.gpt2.modeling_gpt2  # noqa: E402, F401

gc.enable()
gc.freeze()
