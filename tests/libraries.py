"""Imports the slow libraries, in an order that works, in the process that `tests.forks` forks."""

import gc

gc.disable()  # the imports make a million permanent objects, which need no garbage collection

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
