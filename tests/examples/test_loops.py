"""The examples with training loops of other libraries learn within their privacy budget."""

import random

import pytest

from groupwise.errors import UserError

WORDS = ('"good"', "bad")


@pytest.mark.parametrize("name", ["accelerate_loop.py", "lightning_loop.py"])
def test_loop_of_another_library_learns_within_its_budget(name, numbers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    epsilon, accuracy = numbers(name)
    assert 7.9 < epsilon <= 8
    assert accuracy >= 0.85


def test_texts_of_a_folder_are_read_and_the_model_is_saved(numbers, tmp_path):
    draw = random.Random(0)
    for name, count in (("train.tsv", 200), ("dev.tsv", 20)):
        rows = [f"a {draw.choice(WORDS)} one\t{draw.randrange(2)}" for _ in range(count)]
        (tmp_path / name).write_text("\n".join(["sentence\tlabel", *rows, ""]))
    shown = ["--disable_tqdm", "True", "--report_to", "none", "--use_cpu", "True"]
    sizes = ["--per_device_train_batch_size", "10", "--max_steps", "2", "--accountant", "rdp", "--epsilon", "3"]
    where = ["--output_dir", str(tmp_path / "out"), "--data", str(tmp_path)]
    epsilon, _ = numbers("text_classification.py", *where, *sizes, *shown)
    assert 2.9 < epsilon <= 3
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= {
        file.name for file in (tmp_path / "out").iterdir()
    }
    with pytest.raises(UserError, match="A finished run cannot be resumed"):
        numbers("text_classification.py", *where, *sizes, *shown)


@pytest.mark.slow
def test_synthetic_reviews_are_classified(numbers, tmp_path):
    shown = ["--disable_tqdm", "True", "--report_to", "none", "--use_cpu", "True"]
    epsilon, accuracy = numbers("text_classification.py", "--output_dir", str(tmp_path), *shown)
    assert 7.9 < epsilon <= 8
    assert accuracy > 0.9
