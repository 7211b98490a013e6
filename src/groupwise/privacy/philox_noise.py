"""Draws standard normals on a GPU with a counter-based generator: each draw is a function of the key and its index.

torch's own GPU generator distributes its numbers over the device's threads, so that two GPU models draw different noise
from the same seed. Here the random words come from Philox4x32-10 (Salmon et al., 2011), a keyed permutation of a
128-bit counter, in torch's integer operations. They are the same bits on every device. Draws 2j and 2j + 1 of a release
are the Box-Muller pair of the counter (j, c2, c3) of 64, 32 and 32 bits. c2, c3 and Philox's 64-bit key are 128 secret
bits of the release. Radius and angle use 64 bits each, in float64, whose last bits may differ between devices. So draws
agree to about 1e-15, and in float32 all but one in ten million are equal. The radius is never 0 and at most 9.5
standard deviations, which a Gaussian exceeds with probability 2e-21.

Uncompiled operations read and write memory a hundred times. torch.compile (Triton) fuses them into one kernel, on a GPU
that it supports; `COMPILED` switches this off. Launching a kernel for each tensor takes the host longer than the GPU
needs to run it. So a release whose tensors stay in the same memory is captured as a CUDA graph.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, chain, groupby

import torch
from torch import Tensor

CHUNKS = {"cpu": 1 << 17, "cuda": 1 << 20}
"""Entries that uncompiled operations process at a time, by device type, at about 150 bytes each. Other devices may lack
int64 or float64, so their noise is drawn on the CPU."""
FEW = 1 << 16
"""Tensors of up to this many entries are processed together, which is faster than one kernel for each."""
COMPILED = True
"""Whether the operations are compiled for a GPU."""
STEADY, MAX_GRAPHS, MAX_SEEN = 3, 8, 64
"""Releases from the same memory before a graph is captured; the most graphs; the most sets of addresses to count."""
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
Numbered = tuple[Tensor, float, int]
"""A flat tensor, the std of its noise, and the index of its first entry in the release."""
Kernel = Callable[[Tensor, Tensor, Tensor], None]
"""`noise_`, or its compiled version."""
Sums = tuple[tuple[int, int, torch.dtype], ...]
"""Address, entries and dtype of each tensor of a release."""


def add_(digest: bytes, tensors: Sequence[Numbered], divisor: float) -> None:
    """Add N(0, std²) in place to tensors of one device and dtype, and divide by ``divisor``.

    Entry i of the release gets draw i under the secret ``digest``. Large tensors take one kernel each, small ones are
    processed together. All kernel arguments are sent to the device at once.
    """
    device = tensors[0][0].device
    where = device if device.type in CHUNKS else torch.device("cpu")
    kernel, chunk = kernel_on(where), CHUNKS[where.type]
    most = chunk if kernel is noise_ else max(len(tensor) for tensor, _, _ in tensors)
    groups = _groups(
        [
            (part, std, first + place * most)
            for tensor, std, first in tensors
            for place, part in enumerate(tensor.split(most) if len(tensor) > most else (tensor,))
        ],
        chunk,
    )
    table = [[float(int.from_bytes(digest[at : at + 4], "little")) for at in range(0, 16, 4)]]
    for group in groups:
        start = 0
        for part, std, first in group:
            table.append([first - start, std, divisor, len(part)])
            start += len(part)
    parts = [[part for part, _, _ in group] for group in groups]
    work, host = partial(_add, kernel, parts, where), torch.tensor(table, dtype=torch.float64)
    if kernel is noise_ or len(groups) == 1:
        work(host.to(where, non_blocking=True))
    else:
        _repeated(work, host, where, tuple((part.data_ptr(), len(part), part.dtype) for part in chain(*parts)))


def _add(kernel: Kernel, groups: Sequence[Sequence[Tensor]], where: torch.device, table: Tensor) -> None:
    """Run the kernel on each group of flat tensors; the table has the secret, then one row per tensor."""
    secret, rows = table.tensor_split([1])
    for parts, own in zip(groups, rows.split([len(parts) for parts in groups]), strict=True):
        device = parts[0].device
        if len(parts) == 1 and where == device:
            kernel(parts[0], own, secret)
            continue
        sums = torch.cat([*parts]).to(where)
        kernel(sums, torch.repeat_interleave(own, own[:, 3].long(), dim=0, output_size=len(sums)), secret)
        torch._foreach_copy_([*parts], sums.to(device).split([len(part) for part in parts]))


_seen: Counter[Sums] = Counter()
_graphs: dict[Sums, tuple["torch.cuda.CUDAGraph", Tensor]] = {}
"""The sums' addresses -> the graph of a release's kernels, and the table that they read."""


def _repeated(work: Callable[[Tensor], None], host: Tensor, where: torch.device, sums: Sums) -> None:
    """Do the work on the host's table, by a CUDA graph once the sums have had the same addresses a few times."""
    if (known := _graphs.get(sums)) is not None:
        known[1].copy_(host, non_blocking=True)
        known[0].replay()
        return
    table = host.to(where, non_blocking=True)
    if len(_seen) == MAX_SEEN:
        _seen.clear()
    _seen[sums] += 1
    if _seen[sums] <= STEADY or len(_graphs) == MAX_GRAPHS:
        work(table)
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work(table)
    graph.replay()
    _graphs[sums] = graph, table


def _groups(parts: Sequence[Numbered], chunk: int) -> list[list[Numbered]]:
    """Group small parts, about ``chunk`` entries per group; each large part is a group."""
    small = [part for part in parts if len(part[0]) <= FEW]
    ends = accumulate(len(part[0]) for part in small)
    together = groupby(zip(small, ends, strict=True), lambda each: each[1] // chunk)
    return [[part for part, _ in some] for _, some in together] + [[part] for part in parts if len(part[0]) > FEW]


def noise_(sums: Tensor, rows: Tensor, secret: Tensor) -> None:
    """Add noise to sums (n,) in place: (sum + std · draw) / divisor.

    Args:
        sums: float32 or float64, which is also the dtype of the computation.
        rows: float64 (n, 4), or (1, 4) for all: index of the draw minus index in `sums`, std, divisor, unused.
        secret: float64 (1, 4), four integers below 2³².
    """
    number, std, divisor, _ = rows.unbind(1)
    numbers = number.long() + torch.arange(len(sums), device=sums.device)
    noise = draws(numbers, secret[0].long()).to(sums.dtype) * std.to(sums.dtype)
    sums.copy_((sums + noise) / divisor.to(sums.dtype))


def draws(numbers: Tensor, secret: Tensor) -> Tensor:
    """Return the draws of N(0, 1) with these indices, int64 (n,), under four secret words, int64 (4,): float64 (n,)."""
    block = numbers >> 1
    counter = (block & WORD, block >> 32, secret[2], secret[3])
    first, second, third, fourth = philox(counter, (secret[0], secret[1]))
    uniform = (first.double() * 2.0**-32).add(second.double().add(0.5), alpha=2.0**-64).clamp(max=1.0 - 2.0**-53)
    radius = uniform.log().mul(-2.0).sqrt()
    angle = (third.double() * 2.0**-32).add(fourth.double(), alpha=2.0**-64).mul(2.0 * math.pi)
    return radius * torch.where(numbers & 1 == 0, angle.cos(), angle.sin())


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return Philox4x32-10 of counters of four words, int64 in [0, 2³²), which broadcast, as four words.

    A product of two words wraps around in int64. Its 64 bits are correct, but ``>>`` extends the sign, so each word is
    masked to 32 bits before it is used.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        even, odd = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((odd >> 32) ^ c1 ^ k0) & WORD, odd, ((even >> 32) ^ c3 ^ k1) & WORD, even
        k0, k1 = (k0 + INCREMENTS[0]) & WORD, (k1 + INCREMENTS[1]) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


@lru_cache
@torch.no_grad()
def kernel_on(device: torch.device) -> Kernel:
    """Return :func:`noise_` for a device, compiled if compilation works and gives the same results."""
    if not (COMPILED and device.type == "cuda" and torch.cuda.is_available()):
        return noise_
    compiled = torch.compile(noise_, dynamic=True)
    try:
        if all(_agree(compiled, device, dtype, count) for dtype in (torch.float32, torch.float64) for count in (1, 99)):
            return compiled
        reason = "its draws differ from those of uncompiled operations"
    except Exception as error:  # whatever a compiler raises
        reason = str(error).splitlines()[0]
    warnings.warn(f"The noise is not compiled, so it takes longer to draw: {reason}.", stacklevel=2)
    return noise_


def _agree(compiled: Callable[..., object], device: torch.device, dtype: torch.dtype, count: int) -> bool:
    """Whether compiled and uncompiled operations give the same sums, for a table of `count` rows."""
    rows = torch.tensor([[2.0**34 - 50, 1.5, 7.0, 0.0]], dtype=torch.float64, device=device).repeat(count, 1)
    secret = torch.arange(1.0, 5.0, dtype=torch.float64, device=device)[None]
    ours, theirs = (torch.arange(99, dtype=dtype, device=device) for _ in range(2))
    compiled(ours, rows, secret)
    noise_(theirs, rows, secret)
    return torch.allclose(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=1e-12 if dtype == torch.float64 else 1e-6)
