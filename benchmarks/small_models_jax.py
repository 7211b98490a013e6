"""Runs the small models by jax_privacy:  python benchmarks/small_models_jax.py [model=logistic,...] [rounds=7]

`python -m benchmarks.small_models jax=PYTHON` calls it, where PYTHON belongs to an environment with `jax`,
`jax-privacy` and `optax`; nothing of groupwise is imported. The loop follows the library's documentation:
`CyclicPoissonSampling`, batches padded to multiples of 32, and a jitted step of `clipped_grad`, `gaussian_privatizer`
and SGD. The networks are those of `benchmarks.small_models`, written in JAX. It prints a line of JSON for each model,
with the median over rounds of processor milliseconds per step.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import batch_selection, noise_addition
from jax_privacy.clipping import clipped_grad

jax.config.update("jax_platforms", "cpu")
Parameters = Any
RANDOM = np.random.default_rng(0)
STEPS = 100_000


def weights(*shape: int) -> tuple[jax.Array, jax.Array]:
    """A weight, whose last axis is the output, and a bias."""
    scale = np.prod(shape[:-1]) ** -0.5
    return jnp.asarray(RANDOM.normal(0, scale, shape), jnp.float32), jnp.zeros(shape[-1])


def dense(x: jax.Array, layer: Parameters) -> jax.Array:
    """A linear layer."""
    return x @ layer[0] + layer[1]


def conv(x: jax.Array, layer: Parameters, stride: int = 1, padding: int = 0) -> jax.Array:
    """A convolution of images (B, H, W, c)."""
    pads = ((padding, padding), (padding, padding))
    y = jax.lax.conv_general_dilated(x, layer[0], (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y + layer[1]


def pool(x: jax.Array, size: int, stride: int, how: str) -> jax.Array:
    """Pooling of images (B, H, W, c)."""
    windows = (1, size, size, 1), (1, stride, stride, 1), "VALID"
    if how == "max":
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *windows)
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, *windows) / size**2


def mlp(layers: Parameters, x: jax.Array) -> jax.Array:
    """Linear layers with ReLU between them."""
    for layer in layers[:-1]:
        x = jax.nn.relu(dense(x, layer))
    return dense(x, layers[-1])


def cnn(layers: Parameters, x: jax.Array) -> jax.Array:
    """3 × 3 convolutions with average pooling after every second one, then a linear layer."""
    for number, layer in enumerate(layers[:-1]):
        x = jax.nn.relu(conv(x, layer, padding=1))
        x = pool(x, 2, 2, "mean") if number % 2 else x
    return dense(x.reshape(len(x), -1), layers[-1])


def mnist_cnn(layers: Parameters, x: jax.Array) -> jax.Array:
    """The network of Opacus's MNIST example."""
    x = pool(jax.nn.relu(conv(x, layers[0], 2, 3)), 2, 1, "max")
    x = pool(jax.nn.relu(conv(x, layers[1], 2)), 2, 1, "max")
    return mlp(layers[2:], x.reshape(len(x), -1))


def lstm(layers: Parameters, tokens: jax.Array) -> jax.Array:
    """An embedding, an LSTM, and a linear layer on its last output."""
    embedding, of_input, of_state, head = layers

    def step(state: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        h, c = state
        i, f, g, o = jnp.split(dense(x, of_input) + dense(h, of_state), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    zeros = jnp.zeros((len(tokens), of_state[0].shape[0]))
    (h, _), _ = jax.lax.scan(step, (zeros, zeros), embedding[tokens].swapaxes(0, 1))
    return dense(h, head)


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer norm without a bias, whose cost is negligible."""
    return jax.nn.standardize(x, epsilon=1e-5) * scale


def transformer(layers: Parameters, tokens: jax.Array) -> jax.Array:
    """Two blocks, and a linear layer on the mean of their outputs."""
    embedding, blocks, head = layers
    x = embedding[tokens]
    for before, qkv, out, between, up, down in blocks:
        q, k, v = jnp.moveaxis(dense(layer_norm(x, before), qkv).reshape(*x.shape[:2], 3, 4, -1), 2, 0)
        x = x + dense(jax.nn.dot_product_attention(q, k, v).reshape(x.shape), out)
        x = x + dense(jax.nn.gelu(dense(layer_norm(x, between), up)), down)
    return dense(x.mean(1), head)


def _table(words: int, width: int) -> jax.Array:
    return jnp.asarray(RANDOM.normal(0, 1, (words, width)), jnp.float32)


def _block(d: int) -> Parameters:
    return jnp.ones(d), weights(d, 3 * d), weights(d, d), jnp.ones(d), weights(d, 4 * d), weights(4 * d, d)


def _cnn(*channels: int, size: int) -> Parameters:
    layers = [weights(3, 3, *pair) for pair in pairwise(channels)]
    return [*layers, weights(channels[-1] * size**2, 10)]


Made = tuple[Callable[[Parameters, jax.Array], jax.Array], Parameters, tuple[int, ...], int, int, int]
MODELS: dict[str, Callable[[], Made]] = {
    "logistic": lambda: (mlp, [weights(32, 2)], (32,), 2, 256, 10_000),
    "tabular": lambda: (mlp, [weights(104, 64), weights(64, 32), weights(32, 2)], (104,), 2, 256, 10_000),
    "digits_cnn": lambda: (cnn, _cnn(1, 16, 32, size=4), (8, 8, 1), 10, 256, 2_000),
    "mnist_cnn": lambda: (
        mnist_cnn,
        [weights(8, 8, 1, 16), weights(4, 4, 16, 32), weights(512, 32), weights(32, 10)],
        *((28, 28, 1), 10, 64, 10_000),
    ),
    "cifar_cnn": lambda: (cnn, _cnn(3, 32, 32, 64, 64, size=8), (32, 32, 3), 10, 64, 2_000),
    "lstm": lambda: (
        lstm,
        [_table(1000, 32), weights(32, 256), weights(64, 256), weights(64, 2)],
        *((32,), 2, 64, 10_000),
    ),
    "transformer": lambda: (
        transformer,
        [_table(1000, 64), [_block(64), _block(64)], weights(64, 2)],
        *((32,), 2, 64, 10_000),
    ),
}
"""Name -> network, its parameters, shape of an example, classes, batch size, number of examples."""


def training(name: str) -> Iterator[None]:
    """An iterator; each `next` takes one training step."""
    network, parameters, shape, classes, batch, size = MODELS[name]()
    x = RANDOM.integers(0, 1000, (size, *shape)) if len(shape) == 1 and name in ("lstm", "transformer") else None
    x = RANDOM.normal(size=(size, *shape)).astype(np.float32) if x is None else x
    y = RANDOM.integers(0, classes, size)

    def loss(parameters: Parameters, x: jax.Array, y: jax.Array, real: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(network(parameters, x), y)
        return (losses * real).sum()

    gradient = clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2, 3), normalize_by=batch)
    privatizer = noise_addition.gaussian_privatizer(
        stddev=gradient.sensitivity() * 1.0, prng_key=jax.random.key(int(RANDOM.integers(2**31)))
    )
    optimizer = optax.sgd(0.01)

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def update(parameters: Parameters, noise: Any, state: Any, *batch: jax.Array) -> tuple[Parameters, Any, Any]:
        noised, noise = privatizer.update(gradient(parameters, *batch), noise)
        updates, state = optimizer.update(noised, state, parameters)
        return optax.apply_updates(parameters, updates), noise, state

    state, noise = optimizer.init(parameters), privatizer.init(parameters)
    sampling = batch_selection.CyclicPoissonSampling(
        batch / size, STEPS, partition_type=batch_selection.PartitionType.INDEPENDENT
    )
    for drawn in sampling.batch_iterator(size, rng=0):
        rows = batch_selection.pad_to_multiple_of(drawn, 32)
        parameters, noise, state = update(parameters, noise, state, x[rows], y[rows], (rows >= 0).astype(np.float32))
        jax.block_until_ready(parameters)
        yield None


def main() -> None:
    """Measure the models of the command line."""
    given = dict(item.split("=", 1) for item in sys.argv[1:])
    for name in given.get("model", ",".join(MODELS)).split(","):
        steps = training(name)
        for _ in range(60):  # compile for most padded sizes
            next(steps)
        rounds = []
        for _ in range(int(given.get("rounds", 7))):
            began = time.process_time()
            for _ in range(20):
                next(steps)
            rounds.append(1e3 * (time.process_time() - began) / 20)
        found = {"model": name, "milliseconds": median(rounds), "rounds": len(rounds), "steps": 20}
        print(json.dumps(found | {"version": version("jax-privacy")}), flush=True)


if __name__ == "__main__":
    main()
