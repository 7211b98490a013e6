"""Messages of cut tensors: the command's options, and that what it counts is what was foretold."""

import pytest

from benchmarks import tensor
from groupwise.errors import UserError


@pytest.mark.parametrize(
    ("argument", "message"),
    [("parts=0", "parts=0 was given"), ("part=2", r"no key part \(did you mean parts\?\)"), ("steps=x", "steps")],
)
def test_a_mistake_is_one_sentence(argument, message):
    with pytest.raises(UserError, match=message):
        tensor.parse([argument])


def test_help_names_every_key():
    for key in vars(tensor.TensorOptions()):
        assert f"  {key}=" in tensor.HELP


@pytest.mark.slow
def test_what_is_counted_was_foretold(capsys):
    assert tensor.main(["layers=1", "width=64", "words=101", "length=8", "steps=1"]) == 0
    _, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert [row[0] for row in rows] == list(tensor.CLIPPINGS)
    for row in rows:
        counted, foretold, norms, size, expected = row[1:6]
        assert counted == foretold and size == expected
        assert (norms == "0") == (row[0] in ("none", "device"))
