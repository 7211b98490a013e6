"""The checkout that this package is installed from."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CONF = CHECKOUT / "conf"
