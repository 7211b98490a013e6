"""The emulated GPU: it refuses what CUDA refuses, lays tensors out as cuDNN does, and counts."""

import pytest

LAYOUTS = """
last = torch.channels_last
with EmulatedGPU():
    x = torch.empty(2, 8, 6, 6, device="cuda").to(memory_format=last)
    w = torch.empty(4, 8, 3, 3, device="cuda", requires_grad=True)
    y = torch.nn.functional.conv2d(x, w)
    print(y.is_contiguous(memory_format=last), y.is_contiguous())
    plain = torch.nn.functional.conv2d(x.contiguous(), w)
    print(plain.is_contiguous())
    grad, = torch.autograd.grad(y.sum(), w)
    print(grad.is_contiguous(memory_format=last), grad.device)
"""

REFUSALS = """
def refusal(run):
    try:
        run()
    except Exception as error:
        return type(error).__name__
    return "nothing"

def backward(groups):
    x, each = torch.empty(1, groups, 2, device="cuda"), torch.empty(1, groups, device="cuda")
    mask = [True, True, True]
    torch.ops.aten.native_group_norm_backward(x, x, each, each, each[0], 1, groups, 2, groups, mask)

with EmulatedGPU():
    x = torch.empty(2, 8, 6, 6, device="cuda")
    last = x.to(memory_format=torch.channels_last)
    one = torch.ones(8, device="cuda")
    norm = lambda x: torch.native_group_norm(x, one, one, 2, 8, 36, 4, 1e-5)
    print(refusal(lambda: norm(last)), refusal(lambda: norm(x)))
    print(refusal(lambda: torch.nn.functional.group_norm(last, 4, one, one)))  # copies first, as CUDA does
    print(refusal(lambda: x.sum().item()), refusal(lambda: bool((x > 0).all())), refusal(lambda: x[x > 0]))
    print(refusal(lambda: x + torch.ones(8, 6, 6)), refusal(lambda: x + torch.tensor(1.0)))
    print(refusal(lambda: backward(65535)), refusal(lambda: backward(65536)))
    print(refusal(lambda: torch.ones(2) + 1))
"""

COUNTS = """
with EmulatedGPU() as gpu:
    a, b = torch.empty(10, 20, device="cuda"), torch.empty(20, 30, device="cuda")
    with gpu.counted() as row:
        c = (a @ b).t().view(-1, 10)
        c.add_(1)
        torch._foreach_mul_([a, b], 2.0)
    print(row["operations"], row["launches"], row["bytes"], row["waits"])
    with gpu.counted() as row:
        a @ a.t()  # one matrix, read once
        a.new_zeros(3)
        b.as_strided((6, 10), (5, 1)).contiguous()  # rows of ten, five numbers apart
    print(row["bytes"])
    with gpu.counted() as row:
        host = c.cpu()
        up = torch.ones(3).to("cuda")
    print(host.device, host.sum().item(), sum(row["waits"].values()), sum(row["uploads"].values()))
"""


@pytest.fixture(scope="module")
def told(on_gpu) -> tuple[str, str, str]:
    """What each of them prints, from one process."""
    layouts, refusals, counts = on_gpu("\nprint('==')\n".join((LAYOUTS, REFUSALS, COUNTS))).split("==\n")
    return layouts, refusals, counts


def test_convolutions_answer_in_channels_last_where_an_operand_is(told) -> None:
    assert told[0].split() == ["True", "False", "True", "True", "cuda:0"]


def test_what_cuda_refuses_is_refused(told) -> None:
    lines = [line.split() for line in told[1].splitlines()]
    assert lines[0] == ["Refused", "nothing"]
    assert lines[1] == ["nothing"]
    assert lines[2] == ["Waits", "Waits", "Waits"]
    assert lines[3] == ["FakeTensorDeviceMismatchError", "nothing"]  # two devices, but a number may come from the host
    assert lines[4] == ["nothing", "Refused"]
    assert lines[5] == ["nothing"]  # the host's own tensors are real


def test_operations_bytes_and_copies_are_counted(told) -> None:
    counted, once, copied = told[2].splitlines()
    product, added, scaled = 4 * (200 + 600 + 300), 4 * 2 * 300, 4 * 2 * (200 + 600)
    assert counted == f"5 3 {product + added + scaled} {{}}"
    assert int(once) == 4 * ((200 + 100) + 3 + (35 + 60))
    assert copied.split() == ["cpu", "0.0", "1", "1"]


def test_without_a_compiler_the_reason_is_said(monkeypatch) -> None:
    from benchmarks.emulated import guard
    from groupwise.errors import UserError

    monkeypatch.setenv("PATH", "")
    assert "g++" in (guard.why_not() or "")
    with pytest.raises(UserError, match="no g\\+\\+"):
        guard.load()
