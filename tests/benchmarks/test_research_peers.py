"""fastDP and private-transformers are measured only if the option `peers` names their folder."""

import pytest

from benchmarks import research_peers
from benchmarks.methods import make
from benchmarks.throughput import Options
from benchmarks.workloads import build
from groupwise.errors import UserError


def test_without_peers_they_are_left_out_or_raise() -> None:
    assert not [name for name in Options().methods if research_peers.package_of(name)]
    with pytest.raises(UserError, match=r"private_transformers cannot be imported .*: give peers=FOLDER"):
        make("private_transformers", build("mlp", tiny=True))
