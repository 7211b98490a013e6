"""Trains a small network by Algorithm 1 of He et al. (ICLR 2023), written out by hand: adaptive per-layer clipping.

    python examples/method.py        scikit-learn's digits at ε = 8, in seconds

"Line 8" etc. are lines of the algorithm. Layer k is a matrix θ_k of shape (p, d + 1): its weights and, as the column
of an input that is always 1, its bias. B is the expected batch size; the drawn batch S_t has n examples, maybe none.
`groupwise.clipping` does the same inside autograd, for other layers and groups; the example's test compares the two.
"""

from itertools import pairwise

import numpy as np
from numpy.random import Generator

from groupwise.privacy import make_plan

Array = np.ndarray


def with_bias(x: Array) -> Array:
    """The inputs (n, d) with a column of ones, (n, d + 1)."""
    return np.column_stack([x, np.ones(len(x))])


def forward(theta: list[Array], x: Array) -> tuple[list[Array], Array]:
    """The activations that enter each layer, (n, d_k + 1), and the logits (n, classes); tanh between layers."""
    activations = [with_bias(x)]
    for theta_k in theta[:-1]:
        activations.append(with_bias(np.tanh(activations[-1] @ theta_k.T)))
    return activations, activations[-1] @ theta[-1].T


def output_gradients(logits: Array, labels: Array) -> Array:
    """∂ loss_i / ∂ logits_i of the cross entropy, (n, classes): of each example's own loss, never of a mean."""
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True) - np.eye(logits.shape[1])[labels]


def clip_layers(theta: list[Array], activations: list[Array], g: Array, C: Array) -> tuple[list[Array], Array]:
    """Lines 7-12, from the logits' gradients g (n, classes): clipped sums g̃_k, shaped as θ_k, and counts b̄_k, (K,)."""
    sums, counts = [np.zeros_like(theta_k) for theta_k in theta], np.zeros(len(theta))
    for k in reversed(range(len(theta))):  # line 7
        a = activations[k]
        # Line 8. One example's gradient is g_k⁽ⁱ⁾ = gᵢ aᵢᵀ, so ‖g_k⁽ⁱ⁾‖ = ‖gᵢ‖ ‖aᵢ‖, and it is never formed.
        norms = np.linalg.norm(g, axis=1) * np.linalg.norm(a, axis=1)
        # Line 9. g̃_k = Σᵢ g_k⁽ⁱ⁾ · min(1, C_k / ‖g_k⁽ⁱ⁾‖), weighing and adding up in one product.
        factors = np.minimum(1.0, C[k] / np.maximum(norms, np.finfo(float).tiny))
        sums[k] = (factors[:, None] * g).T @ a
        counts[k] = np.sum(norms <= C[k])  # line 10
        if k > 0:  # line 11: back through the weights (the bias has no input), then tanh, whose derivative is 1 - tanh²
            g = (g @ theta[k])[:, :-1] * (1 - a[:, :-1] ** 2)
    return sums, counts


def add_noise(sums: list[Array], C: Array, gamma: Array, sigma_new: float, rng: Generator) -> list[Array]:
    """Line 13: g̃_k + z_k with z_k ~ N(0, σ_new² S² γ_k²). S is one number, since one example is in all layers."""
    S = np.sqrt(np.sum(C**2 / gamma**2))
    return [g + sigma_new * S * gamma_k * rng.standard_normal(g.shape) for g, gamma_k in zip(sums, gamma, strict=True)]


def move_thresholds(
    C: Array, counts: Array, n: int, B: int, q: float, eta: float, sigma_b: float, rng: Generator
) -> Array:
    """Lines 15-17: C_k · exp(-η (b̃_k - q)) rises where fewer than a share q of the examples lie within C_k.

    The paper adds its noise to b̄_k = Σᵢ bᵢ. Its proof needs Σᵢ (bᵢ - ½), which gets the noise here (docs/errata.md).
    """
    b = (counts - n / 2 + sigma_b * rng.standard_normal(len(C))) / B + 1 / 2
    return C * np.exp(-eta * (b - q))


def train(
    x: Array,
    y: Array,
    T: int = 150,  # steps
    B: int = 256,  # expected batch size
    epsilon: float = 8.0,
    delta: float = 1e-5,
    r: float = 0.01,  # the counts' share of the budget
    eta_t: float = 1.0,  # learning rate of the weights
    eta: float = 0.3,  # learning rate of the thresholds
    q: float = 0.7,  # target quantile
) -> tuple[list[Array], Array, float]:
    """The weights θ, the thresholds C and the ε spent, for inputs x (N, d) and labels y (N,)."""
    public = np.random.default_rng(0)  # initial weights may be known
    secret = np.random.default_rng()  # the system's entropy: whoever can repeat these draws can take the noise off
    widths = [x.shape[1], 64, int(y.max()) + 1]
    theta = [public.uniform(-1, 1, (p, d + 1)) / np.sqrt(d) for d, p in pairwise(widths)]  # θ_0
    N, K = len(x), len(theta)
    C = np.full(K, 0.7)  # chosen without the data
    gamma = np.ones(K)  # the "global" allocation of noise
    # Lines 2-4: σ from the accountant, σ_b = σ √(K / 4r) for the counts, σ_new = σ / √(1 - r) for the gradients.
    plan = make_plan(
        dataset_size=N, expected_batch_size=B, steps=T, epsilon=epsilon, delta=delta, num_groups=K, quantile_budget=r
    )
    for _ in range(T):  # line 5
        S_t = np.flatnonzero(secret.random(N) < plan.sample_rate)  # line 6: each example by itself, at rate ρ = B/N
        activations, logits = forward(theta, x[S_t])
        sums, counts = clip_layers(theta, activations, output_gradients(logits, y[S_t]), C)
        noisy = add_noise(sums, C, gamma, plan.gradient_noise_multiplier, secret)  # with the C that clipped
        theta = [theta_k - eta_t * g / B for theta_k, g in zip(theta, noisy, strict=True)]  # line 14: B, never n
        C = move_thresholds(C, counts, len(S_t), B, q, eta, plan.count_noise_multiplier, secret)
    return theta, C, plan.spent(T).epsilon


def main() -> None:
    """Train on four fifths of the digits, and tell the accuracy on the rest."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
    theta, C, epsilon = train(x_train, y_train)
    accuracy = np.mean(forward(theta, x_test)[1].argmax(axis=1) == y_test)
    print(f"accuracy {accuracy:.3f} at epsilon {epsilon:.2f}, thresholds {np.round(C, 3).tolist()}")


if __name__ == "__main__":
    main()
