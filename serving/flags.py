"""Command line flags made from the settings. Host only.

One rule: a flag is the setting's dotted name with dashes, `engine.` left out:
`--port`, `--fetch-timeout-seconds`, `--model`, `--pages-page-size`.
"""

import argparse
import ast
import dataclasses
import inspect
import textwrap
import typing
from operator import attrgetter
from typing import Any

from jaxmm.config import field_names
from serving.config import ENGINE_PREFIX


def flag_names(cls: type) -> dict[str, str]:
    """Flag of every setting, `--pages-page-size`, to the setting, `engine.pages.page_size`."""
    return {_flag(setting): setting for setting in field_names(cls)}


def add_flags(parser: argparse.ArgumentParser, cls: type, prefix: str = "") -> None:
    """Add a flag for each setting of `cls` whose name begins with `prefix`; help has defaults."""
    docs, kinds, defaults = setting_docs(cls), field_names(cls), cls()
    group = parser.add_argument_group("settings")
    for flag, setting in flag_names(cls).items():
        if setting.startswith(prefix):
            group.add_argument(
                flag,
                dest=setting,
                default=argparse.SUPPRESS,
                metavar=_metavar(kinds[setting]),
                help=f"{docs[setting]} [{attrgetter(setting)(defaults)!r}]".replace("%", "%%"),
            )


def given_settings(arguments: argparse.Namespace, cls: type) -> dict[str, str]:
    """Settings that the command line gave, as text, by dotted name."""
    values = vars(arguments)
    return {setting: values[setting] for setting in field_names(cls) if setting in values}


def setting_docs(cls: type, prefix: str = "") -> dict[str, str]:
    """Docstring of each setting by dotted name, read from the source below the field."""
    hints = typing.get_type_hints(cls)
    own = _field_docs(cls)
    docs: dict[str, str] = {}
    for f in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[f.name]):
            docs |= setting_docs(hints[f.name], f"{prefix}{f.name}.")
        else:
            docs[prefix + f.name] = own.get(f.name, "")
    return docs


def _field_docs(cls: type) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef), f"the source of {cls} is no class"
    docs: dict[str, str] = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def _flag(setting: str) -> str:
    return "--" + setting.removeprefix(ENGINE_PREFIX).replace(".", "-").replace("_", "-")


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "A,B,…"
    return {bool: "true|false", int: "N", float: "X"}.get(kind, "TEXT")
