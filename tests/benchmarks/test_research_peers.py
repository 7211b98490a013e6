"""fastDP and private-transformers are taken from a folder; what they compute is compared when they are measured."""

import pytest

from benchmarks import research_peers
from benchmarks.methods import make
from benchmarks.throughput import Options
from benchmarks.workloads import build
from groupwise.errors import UserError


def test_without_a_folder_they_are_not_asked_for_or_told_where_to_be() -> None:
    assert not [name for name in Options().methods if research_peers.package_of(name)]
    with pytest.raises(UserError, match=r"private_transformers cannot be imported .*: give peers=FOLDER"):
        make("private_transformers", build("mlp", tiny=True))
