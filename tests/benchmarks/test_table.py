"""The printed table: medians over rounds with their range, refusals in words."""

from benchmarks.results import table


def test_medians_ranges_and_refusals() -> None:
    usual = {"workload": "gpt2", "batch": 4, "layers": 2, "device": "cpu", "threads": 1, "dtype": "float32"}
    usual |= {
        "memory_format": "contiguous",
        "memory_ratio": 1.25,
        "floor": 0.99,
        "noise_seconds": 0.004,
        "cpu_seconds": 1.0,
        "wall_seconds": 1.01,
        "status": "ok",
    }
    rows = [
        usual | {"method": "flat", "ratio": ratio, "examples_per_second": 10 * ratio, "round": number}
        for number, ratio in enumerate([0.5, 0.9, 0.7])
    ]
    rows.append(usual | {"method": "opacus_ghost", "status": "refused: tied weights"})
    printed = table(rows).splitlines()
    assert printed[1] == "gpt2: B 4, 2 layers, cpu, 1 threads, float32"
    assert printed[3].split() == ["flat", "contiguous", "7", "0.700", "[0.500", "..", "0.900]", "1.250", "0.990", "4"]
    assert printed[4].split(maxsplit=2) == ["opacus_ghost", "contiguous", "refused: tied weights"]
    assert len(printed) == 5
    busy = table([row | {"wall_seconds": 2.5} for row in rows]).splitlines()
    assert busy[:-1] == printed and "2.50 times CPU time" in busy[-1]
