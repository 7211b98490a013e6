"""Tells which line of which file gave a key its value:  python run.py --why clip.threshold task=sst2 scale=mini"""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from groupwise.config import schema
from groupwise.config.compose import composer_of, in_one_sentence, register, unknown_key
from groupwise.config.keys import FREE_KEYS, groups, key_types, roots
from groupwise.config.tables import Tables, file_part, leaves
from groupwise.errors import UserError
from groupwise.sweeps.cells import text


@dataclass(frozen=True)
class Statement:
    """A key's value in one place; of all statements of a key, the last one wins."""

    key: str
    value: Any
    """As it is written there: ``${at_epsilon:{3:40,8:20}}``."""
    place: str
    """File and line, or the argument of the command line."""


def why(arguments: Sequence[str], conf: Path) -> str:
    """For each key among `arguments`, its value and the statements that led to it, the one that wins last.

    Args:
        arguments: of the command line: ``--why``, keys or sections (``clip``), and settings (``task=sst2``).
        conf: the folder of configuration.

    Raises:
        UserError: no key, one that the schema lacks, a flag, or several values for a setting.
        HydraException: as composing a run does.
    """
    from hydra import initialize_config_dir

    words = [word for word in arguments if word != "--why"]
    settings = [word for word in words if "=" in word or word.startswith("~")]
    asked = [word for word in words if word not in settings]
    flag = next((word for word in asked if word.startswith("-")), None)
    if flag:
        raise UserError(f"--why takes keys and settings, as in --why clip.threshold task=sst2, and not {flag}.")
    if not asked:
        raise UserError("--why was given no key: name one or several, as in --why clip.threshold task=sst2.")
    for key in asked:
        if key not in key_types() and not key.startswith(FREE_KEYS):
            raise UserError(unknown_key(key, tuple(groups(conf))))
    register()
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        found: dict[str, list[Statement]] = {}
        for statement in statements(settings, conf):
            found.setdefault(statement.key, []).append(statement)
        composed = composer_of(conf).compose(settings)
    if composed.privacy.noise_multiplier is not None:
        follows = Statement("privacy.epsilon", None, "it follows from privacy.noise_multiplier, which is given")
        found["privacy.epsilon"].append(follows)
        composed.privacy.epsilon = None
    keys = dict.fromkeys(key for one in asked for key in _below(one, list(found)))
    return "\n".join(_told(key, _value(composed, key), found[key]) for key in keys)


def _below(asked: str, keys: Sequence[str]) -> list[str]:
    """The keys that a key or a section stands for; of a mapping that has entries, the entries alone."""
    below = [key for key in keys if key.startswith(f"{asked}.")]
    wanted = below or [key for key in keys if key == asked]
    if not wanted:
        raise UserError(f"{asked} has no value in this configuration: ask for {asked.rpartition('.')[0]}.")
    return [key for key in wanted if not any(other.startswith(f"{key}.") for other in keys)]


def statements(overrides: Sequence[str], conf: Path) -> Iterator[Statement]:
    """All that schema, files and command line say in a composition, in its order; inside of `initialize_config_dir`.

    Raises:
        UserError: an override with several values.
        HydraException: as composing does.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = OverridesParser.create().parse_overrides(list(overrides))
    several = next((item.input_line for item in given if item.is_sweep_override()), None)
    if several:
        raise UserError(f"{several} gives several values, where --why looks at one configuration: give one of them.")
    chosen = {item.key_or_group: str(item.input_line) for item in given}
    order = composer_of(conf).defaults(overrides)
    tables = Tables(conf)
    for default in order.defaults:
        path = default.config_path or ""
        if path == "schema":
            yield from _schema(conf)
        elif not path.startswith(("hydra/", "_")):
            root = next((root for root in roots(conf) if (root / f"{path}.yaml").is_file()), conf)
            part = tables.part(path) or file_part(root, path)
            package = () if default.package in (None, "", "_global_") else tuple(default.package.split("."))
            shown = _shown(part.file, conf)
            for keys, value, line in part.statements():
                key = ".".join((*package, *keys))
                place = f"{shown}:{line}"
                if path.startswith("scale/") and "scale" in chosen:
                    place = _argument(chosen["scale"])
                if key in key_types() or key.startswith(FREE_KEYS):
                    yield Statement(key, value, place)
    for item in order.config_overrides:
        value = item.value()
        for keys, each in leaves({item.key_or_group: value}):
            if not item.is_delete():
                yield Statement(".".join(keys), each, _argument(str(item.input_line)))


def _schema(conf: Path) -> Iterator[Statement]:
    shown, lines = _shown(Path(inspect.getfile(schema)), conf), _schema_lines()
    for keys, value in leaves(asdict(schema.RunConfig())):
        yield Statement(".".join(keys), value, f"{shown}:{lines['.'.join(keys)]}")


@cache
def _schema_lines(section: type = schema.RunConfig, prefix: str = "") -> dict[str, int]:
    """Dotted key -> the line of its default in the schema."""
    source, first = inspect.getsourcelines(section)
    found: dict[str, int] = {}
    for number, line in enumerate(source, first):
        if field := re.match(r"    (\w+): (\w+)", line):
            name, kind = field.groups()
            inner = getattr(schema, kind, None)
            found |= _schema_lines(inner, f"{prefix}{name}.") if inner else {f"{prefix}{name}": number}
    return found


def _shown(file: Path, conf: Path) -> str:
    """From the checkout, else from here, else in full."""
    inside = [root for root in (conf.resolve().parent, Path.cwd()) if file.resolve().is_relative_to(root)]
    return str(file.resolve().relative_to(inside[0])) if inside else str(file)


def _argument(line: str) -> str:
    return f"the command line, {line}"


def _value(composed: Any, key: str) -> str:
    try:
        return _written(OmegaConf.select(composed, key))
    except OmegaConfBaseException as error:
        return f"({in_one_sentence(error).rstrip('.')})"


def _written(value: Any) -> str:
    plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    return text(plain)


def _told(key: str, value: str, chain: Sequence[Statement]) -> str:
    written = [_written(statement.value) for statement in chain]
    width = max(map(len, written))
    lines = [f"  {each:{width}}  {statement.place}" for each, statement in zip(written, chain, strict=True)]
    return "\n".join([f"{key}={value}", *lines[:-1], f"{lines[-1]}  <- wins"])
