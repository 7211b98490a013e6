"""Random numbers from the key: they depend on key, step, start and process, and the generators are restored."""

import hashlib
import random
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from groupwise.privacy import NoiseSource, secret_randomness
from groupwise.privacy import randomness as under_test
from groupwise.privacy.randomness import WORDS

KEY = NoiseSource(bytes(range(32)))


def drawn(noise=KEY, step=3, start=64, process=1):
    """Draws from each default generator: a mask by torch, and numbers by Python and NumPy."""
    with secret_randomness(noise, step, start, process=process):
        mask = F.dropout(torch.ones(40, 25), 0.5)
        return mask, random.random(), np.random.random(3)


@pytest.mark.parametrize(
    "other",
    [
        {"noise": NoiseSource(bytes(range(1, 33)))},
        {"step": 4},
        {"start": 65},
        {"process": 0},
        {"step": 1, "process": 3},
    ],
    ids=str,
)
def test_another_key_step_start_or_process_gives_other_numbers(other):
    mine, others = drawn(), drawn(**other)
    agreeing = float((mine[0] == others[0]).float().mean())
    assert abs(agreeing - 0.5) < 0.1  # 1000 fair coins: 6 standard deviations
    assert mine[1] != others[1]
    assert not np.array_equal(mine[2], others[2])


def test_the_three_generators_do_not_repeat_each_other():
    with secret_randomness(KEY, 0):
        torchs = torch.empty(50, dtype=torch.int32).random_().tolist()
        pythons = [random.getrandbits(32) & 0x7FFFFFFF for _ in range(50)]
        numpys = (np.random.randint(0, 1 << 32, 50, dtype=np.uint32) & 0x7FFFFFFF).tolist()
    assert len({*torchs, *pythons, *numpys}) == 150


def test_threads_take_turns():
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda step: drawn(step=step), [1, 2, 3] * 40))
    assert all(torch.equal(found[at][0], found[at % 3][0]) and found[at][1] == found[at % 3][1] for at in range(120))


def test_generators_are_restored_afterwards_and_after_an_error():
    def state():
        numpy_state = np.random.get_state()
        return torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2:]

    np.random.normal(size=2)  # an even number, as numpy keeps every second draw in its state
    before, plain = state(), F.dropout
    with secret_randomness(KEY, 0):
        assert state() != before
        drawn()
        with secret_randomness(KEY, 1):
            np.random.normal()
        np.random.normal()
    assert state() == before
    with pytest.raises(KeyError), secret_randomness(KEY, 0):
        torch.rand(5), random.random(), np.random.random()
        raise KeyError
    assert state() == before
    assert F.dropout is plain


def test_a_mask_uses_a_word_of_the_generator_for_every_entry():
    """On some processors torch by itself uses one 32-bit seed for the whole mask."""
    with secret_randomness(KEY, 0):
        mask = F.dropout(torch.ones(5000), 0.3) != 0
        after = torch.rand(1)
    with secret_randomness(KEY, 0):
        assert torch.equal(mask, torch.rand(5000) < 0.7)
        assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("word", [1, 2, 300, WORDS - 1])
def test_every_word_of_the_seed_changes_the_masks(monkeypatch, word):
    """So neither the low bits of a seed nor the high ones are ignored."""
    real = hashlib.shake_256

    class Flipped:
        def __init__(self, content):
            self.content = content

        def digest(self, length):
            digest = bytearray(real(self.content).digest(length))
            digest[4 * word + 3] ^= 0xFF
            return bytes(digest)

    expected = drawn()[0]
    monkeypatch.setattr(under_test.hashlib, "shake_256", Flipped)
    assert not torch.equal(drawn()[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_masks_have_the_requested_rate(dtype):
    """200000 draws each: a correct rate fails with probability 1e-6, and one that is off by 0.01 always fails."""
    with secret_randomness(KEY, 0):
        for rate in (0.1, 0.5, 0.9):
            kept = F.dropout(torch.ones(200_000, dtype=dtype), rate)
            assert abs(float((kept != 0).double().mean()) - (1 - rate)) < 5 * (0.25 / 200_000) ** 0.5
            assert float(kept.max()) == pytest.approx(1 / (1 - rate), rel=0.01)


def test_transposed_tensors_and_attention_get_masks():
    with secret_randomness(KEY, 0):
        x = torch.ones(30, 20).t()
        assert 0 < int((F.dropout(x, 0.5) == 0).sum()) < 600
        q = torch.ones(2, 3, 8, 4, requires_grad=True)
        out = F.scaled_dot_product_attention(q, q, torch.ones(2, 3, 8, 4), dropout_p=0.5)
        out.sum().backward()
    assert not torch.allclose(out, torch.ones_like(out))
    assert q.grad is not None


def test_nothing_is_warned_and_torchs_own_kernel_is_restored():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn()
    torch.manual_seed(0)
    ours = torch.rand(1000) < 0.5
    torch.manual_seed(0)
    assert not torch.equal(torch.empty(1000).bernoulli_(0.5) == 1, ours)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_masks_on_a_gpu_depend_on_the_key_too():
    def mask(step):
        with secret_randomness(KEY, step, device="cuda:0"):
            return F.dropout(torch.ones(1000, device="cuda:0"), 0.5)

    before = torch.cuda.get_rng_state("cuda:0")
    assert torch.equal(mask(0), mask(0))
    assert not torch.equal(mask(0), mask(1))
    assert torch.equal(torch.cuda.get_rng_state("cuda:0"), before)
