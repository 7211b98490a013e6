"""Trains a model of your own privately, in a loop of your own, with thresholds that follow a private quantile.

    python examples/own_loop.py        2,000 points at ε = 3, in seconds

What each line is for: docs/privacy.md, "The mechanism, in its order".
"""

import torch

from groupwise.clipping import attach, per_layer
from groupwise.privacy import (
    AdaptiveThresholds,
    NoiseSource,
    PoissonSampler,
    make_plan,
    release_gradients,
    secret_randomness,
)

x = torch.randn(2000, 20)
y = (x[:, 0] > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
partition = per_layer(model)

plan = make_plan(
    dataset_size=2000,
    expected_batch_size=200,
    steps=100,
    epsilon=3,
    delta=1e-5,
    num_groups=len(partition),
    quantile_budget=0.01,
)
print(plan.statement())
noise = NoiseSource.fresh()
sampler = PoissonSampler(plan.dataset_size, plan.sample_rate, noise.derive("sampling"))
thresholds = AdaptiveThresholds(
    initial=[0.5] * plan.num_groups,
    target_quantile=0.6,
    learning_rate=0.3,
    count_noise_multiplier=plan.count_noise_multiplier,
    expected_batch_size=plan.expected_batch_size,
)
engine = attach(model, partition, thresholds.clip_thresholds)

for step in range(plan.steps):
    drawn = sampler.indices(step)
    optimizer.zero_grad()
    engine.reset()  # counts are those of one logical batch
    engine.set_thresholds(thresholds.clip_thresholds, thresholds.count_thresholds)
    for start in range(0, len(drawn), 64):  # microbatches: any size gives the same update
        rows = drawn[start : start + 64]
        with secret_randomness(noise, step, start):  # dropout's masks, if the model had any
            engine.backward(torch.nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="none"))
    release_gradients(
        engine.sensitivity(plan.adjacency),
        allocation="global",
        noise_multiplier=plan.gradient_noise_multiplier,
        expected_batch_size=plan.expected_batch_size,
        noise=noise,
        step=step,
    )
    optimizer.step()
    thresholds.update(engine.counts, engine.examples, noise, step)  # last: the noise needed the old ones

accuracy = (model(x).argmax(1) == y).float().mean()
print(f"epsilon {plan.spent(plan.steps).epsilon:.3f}, accuracy {accuracy:.2f}, thresholds {thresholds.clip_thresholds}")
