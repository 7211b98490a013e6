"""The noise: its distribution, independence between steps, exact replay, and the secrecy of its key."""

import numpy as np
import pytest
import torch

from groupwise.errors import UserError
from groupwise.privacy.cpu_noise import CHUNK
from groupwise.privacy.noise import ALONE, COUNT_STREAM, NoiseSource
from groupwise.privacy.secure_noise import CHUNK as SECURE_CHUNK

SOURCE = NoiseSource.from_seed(7)
DTYPES = [torch.float32, torch.float64]
KINDS = {
    "SFC64": SOURCE,
    "SFC64, compiled": NoiseSource(SOURCE.key),
    "Philox": NoiseSource(SOURCE.key, generator="Philox"),
    "secure": NoiseSource.from_seed(7, secure=True),
}
of_every_kind = pytest.mark.parametrize("source", KINDS.values(), ids=KINDS)


def draw(size=20_000, std=1.0, step=0, stream=0, source=SOURCE, dtype=torch.float32) -> torch.Tensor:
    return source.add_gaussian_(torch.zeros(size, dtype=dtype), std, step, stream)


@of_every_kind
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("std", "step"), [(1e-30, 0), (1e-4, 5), (1.0, 0), (37.0, 5), (1e25, 0)])
def test_noise_is_normal_and_altered_noise_is_not(follows_normal_only, source, dtype, std, step):
    follows_normal_only(draw(std=std, step=step, source=source, dtype=dtype).double().numpy() / std, 1.0)


@of_every_kind
def test_tails_have_the_expected_weight(source):
    noise = draw(2_000_000, source=source).numpy()
    assert (np.abs(noise) > 4.0).sum() == pytest.approx(2e6 * 6.334e-5, abs=45)  # four standard errors


@of_every_kind
def test_entries_are_independent_within_pairs_and_between_chunks(source):
    noise = draw(300_000, source=source, dtype=torch.float64).numpy()
    assert len(np.unique(noise)) > 0.999 * len(noise)
    for lag in (1, 2, CHUNK // 2, CHUNK, SECURE_CHUNK):
        for part in (noise, noise**2):
            assert abs(np.corrcoef(part[:-lag], part[lag:])[0, 1]) < 5 / np.sqrt(len(noise) - lag), lag


@of_every_kind
@pytest.mark.parametrize("other", [{"step": 1}, {"stream": 1}, {"stream": COUNT_STREAM}, {}], ids=str)
def test_another_step_stream_or_key_gives_independent_noise(source, other):
    settings = {"source": source, "dtype": torch.float64}
    noise, another = draw(**settings), draw(**{**settings, **(other or {"source": source.child("shard 0")})})
    assert abs(np.corrcoef(noise, another)[0, 1]) < 5 / np.sqrt(len(noise))
    assert not np.intersect1d(noise, another).size


def test_step_and_stream_are_not_confused():
    assert not torch.equal(draw(step=1, stream=2), draw(step=2, stream=1))
    assert not torch.equal(draw(step=12, stream=3), draw(step=1, stream=23))


@of_every_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_replay_adds_the_same_noise(source, dtype):
    before = torch.get_rng_state()
    copy, noise = NoiseSource.from_state(source.state_dict()), draw(step=4, source=source, dtype=dtype)
    assert torch.equal(torch.get_rng_state(), before), "the global generators are left alone"
    draw(step=1, source=copy)  # what was drawn in between does not matter
    torch.manual_seed(3)
    np.random.seed(3)
    assert torch.equal(draw(step=4, source=copy, dtype=dtype), noise)


@of_every_kind
@pytest.mark.parametrize(
    "shape", [(4, 6, 5, 3), (70, 8, 40, 40), (2, 3, 200, 200)], ids=["small", "several chunks", "rows above a chunk"]
)
def test_the_memory_layout_changes_nothing(source, shape):
    plain = torch.zeros(shape)
    permuted = torch.zeros(shape[::-1]).permute(3, 2, 1, 0)
    last = torch.zeros(shape).to(memory_format=torch.channels_last)
    strided = torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]
    expected = source.add_gaussian_(plain, 1.0, 0, 0)
    for other in (permuted, last, strided):
        assert not other.is_contiguous()
        assert torch.equal(source.add_gaussian_(other, 1.0, 0, 0), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.complex64])
def test_unsupported_dtypes_are_refused(dtype):
    with pytest.raises(UserError, match="convert the summed gradient to float32"):
        draw(dtype=dtype)


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf")])
def test_an_invalid_std_is_refused(std):
    with pytest.raises(UserError, match="std"):
        draw(std=std)


def test_tensor_subclasses_are_refused():
    class Sharded(torch.Tensor):
        pass

    with pytest.raises(UserError, match="Sharded"):
        SOURCE.add_gaussian_(torch.zeros(3).as_subclass(Sharded), 1.0, 0, 0)


def test_fresh_sources_are_secret_and_come_from_the_operating_system():
    sources = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        sources.append(NoiseSource.fresh())
    first, second = sources
    assert first.is_secret and second.is_secret and first.key != second.key
    assert not torch.equal(draw(source=first), draw(source=second))


def test_a_seed_is_no_secret():
    assert not NoiseSource.from_seed(1).is_secret
    assert NoiseSource.from_seed(1).key == NoiseSource.from_seed(1).key != NoiseSource.from_seed(2).key
    assert not NoiseSource(NoiseSource.from_seed(1).key, is_secret=False).is_secret


def test_derived_keys_depend_on_key_and_purpose():
    another = NoiseSource.from_seed(8)
    assert len({SOURCE.derive("sampling"), SOURCE.derive("other"), another.derive("sampling"), SOURCE.key}) == 4
    assert SOURCE.derive("sampling") == NoiseSource(SOURCE.key).derive("sampling")


@pytest.mark.parametrize("key", [b"", b"too short", 32, "x" * 32, None])
def test_an_invalid_key_is_refused(key):
    with pytest.raises(UserError, match="16 bytes"):
        NoiseSource(key)


@pytest.mark.parametrize(
    ("kind", "dtype", "step", "stream", "known"),
    [
        ("SFC64", torch.float32, 2, 0, [0.16762644052505493, 0.6049031019210815, -0.39232322573661804]),
        ("SFC64", torch.float64, 2, 0, [1.1832615738942507, -0.4667602233320072, 1.4734297108741397]),
        ("SFC64", torch.float32, 300, COUNT_STREAM, [-0.6697301864624023, 1.2782646417617798]),
        ("SFC64", torch.float64, 300, -1, [-0.8929522066092911, 0.6692259974259782]),
        ("secure", torch.float64, 2, 0, [-0.41353344844992534, 0.2044901910057888, -0.025984667998272926]),
        ("secure", torch.float32, 300, -1, [-0.870887041091919, 0.9241552948951721]),
    ],
)
def test_noise_matches_known_answers(kind, dtype, step, stream, known):
    """A change here breaks the replay of runs that began before it, and so their guarantee."""
    found = draw(len(known), step=step, stream=stream, dtype=dtype, source=KINDS[kind])
    assert found.tolist() == pytest.approx(known, rel=1e-6)


def test_keys_of_a_seed_and_of_a_purpose_match_known_answers():
    assert SOURCE.key.hex() == "814f7b0e89064a7ee794f4f0724e3fb260383abc1612127cc1bbc9830d134550"
    assert SOURCE.derive("sampling").hex() == "0bcd59247c3ffead5eb5f06564afe84c010790e08b4dca4c621baf20199cd717"


def test_a_child_has_the_same_kind_of_noise_and_another_key():
    child = SOURCE.child("stage 1")
    assert child.key == SOURCE.derive("stage 1") != SOURCE.child("stage 2").key
    assert not child.is_secret and not child.secure and NoiseSource.fresh().child("x").is_secret
    assert NoiseSource.fresh(secure=True).child("x").secure


def test_the_key_is_never_shown():
    shown = repr(SOURCE)
    assert shown == "NoiseSource(is_secret=False, secure=False)"


@pytest.mark.parametrize("secure", [False, True])
def test_the_noise_does_not_depend_on_how_many_threads_draw_it(secure):
    shapes = [(300, 500), (7,), (64, 32, 9, 9), (1,), (90_001,), (200, 400)]
    source = NoiseSource.from_seed(3, secure=secure)

    def release(count: int) -> list[torch.Tensor]:
        torch.set_num_threads(count)
        sums = [
            torch.zeros(shape, dtype=[torch.float32, torch.float64][place % 2]) for place, shape in enumerate(shapes)
        ]
        sums[2] = sums[2].contiguous(memory_format=torch.channels_last)
        source.add_gaussians_(sums, [0.5 + place for place in range(len(sums))], step=4)
        return sums

    alone, together = release(1), release(3)
    assert sum(tensor.numel() for tensor in alone) >= ALONE
    for one, several in zip(alone, together, strict=True):
        assert torch.equal(one, several) and bool(one.any())


@pytest.mark.parametrize("options", [{}, {"generator": "Philox"}, {"secure": True}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_are_numbered_through_the_tensors_of_a_release(options, dtype):
    """So equal tensors get different noise; a tensor with a std of 0 uses no numbers, and all are divided."""
    source = NoiseSource(SOURCE.key, **options)
    sizes = [40_000, 3, 5, 200_000, 7]
    sums = [torch.ones(size, dtype=dtype) for size in sizes]
    source.add_gaussians_(sums, [2.0, 2.0, 0.0, 2.0, 2.0], 1, divisor=4.0)
    assert torch.equal(sums.pop(2), torch.full((5,), 0.25, dtype=dtype))
    joined = torch.ones(sum(sizes) - 5, dtype=dtype)
    source.add_gaussians_([joined], [2.0], 1, divisor=4.0)
    assert torch.equal(torch.cat(sums), joined)


def test_tensors_of_different_dtypes_have_independent_noise():
    sums = [torch.zeros(20_000, dtype=dtype) for dtype in (*DTYPES, *DTYPES)]
    SOURCE.add_gaussians_(sums, [1.0] * 4, 0)
    assert np.abs(np.corrcoef(torch.stack([each.double() for each in sums])) - np.eye(4)).max() < 5 / np.sqrt(20_000)


def test_a_state_keeps_its_generator_and_an_outdated_state_is_refused():
    source = NoiseSource(SOURCE.key, secure=True).settled(torch.device("cuda"))
    assert (source.generator, source.child("stage 1").generator) == ("Philox", "Philox")
    assert source.settled(torch.device("cpu")).generator == "Philox"
    assert SOURCE.settled(torch.device("cpu")).generator == "SFC64"
    state = source.state_dict()
    assert NoiseSource.from_state({**state, "step": 3}).state_dict() == state
    with pytest.raises(UserError, match="start a new training"):
        NoiseSource.from_state({"noise_key": bytes(32), "noise_is_secret": True, "noise_drawn": "pairs"})
    with pytest.raises(UserError, match="generator is 'dice'"):
        NoiseSource(bytes(16), True, generator="dice")


def test_an_unsupported_dtype_is_refused_from_a_thread_too():
    torch.set_num_threads(2)
    with pytest.raises(UserError, match="bfloat16"):
        NoiseSource.from_seed(0).add_gaussians_([torch.zeros(ALONE), torch.zeros(3).bfloat16()], [1.0, 1.0], 0)
