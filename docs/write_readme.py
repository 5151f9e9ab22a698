"""Writes the settings table and the tree of README.md from the source: `make readme`.

Both come from docstrings: of the fields in the config dataclasses, and of the modules. What stands
between a marker and the next `<!-- end -->` is replaced. Host only.
"""

import ast
import re
import typing
from operator import attrgetter
from pathlib import Path

from jaxmm.config import field_names
from serving.config import ServerConfig
from serving.flags import setting_docs

ROOT = Path(__file__).parents[1]
NOTES = {
    "Makefile": "serve, test, check, bench: each works from a clean clone",
    "jaxmm": "the engine",
    "jaxmm/host": "plans and prepares; standard library and numpy, never jax",
    "jaxmm/device": "what runs on the device, and what holds it",
    "jaxmm/models": "one folder a family",
    "jaxmm/models/qwen2_vl": "",
    "jaxmm/models/qwen2_5_vl": "",
    "jaxmm/models/qwen3_vl": "",
    "jaxmm/assets": "the model that is served when none is named",
    "kernels_pallas": "one folder an op: api, portable form, Pallas kernel, references",
    "serving": "HTTP server and command line",
    "configs/deploy": "scripts, container file and manifests to put it on TPUs; see docs/deploy.md",
    "tests": "mirrors the packages; oracles, hand-made numbers, state machines",
    "tests/bench": "benchmarks, each with its command at the top",
    "docs/decisions": "what was measured and what was chosen, a page each",
    "examples": "how the shipped model was made",
}
"""Order and first level of the tree; a folder without Python below it is one line."""
OPEN = ("jaxmm", "jaxmm/host", "jaxmm/device", "jaxmm/models", "kernels_pallas", "serving")
"""Folders whose entries are listed; of the others the first lines of docstrings say enough."""
WIDTH = 32


def filled(text: str) -> str:
    """Replace the generated blocks of the README's text."""
    for name, block in (("settings", settings_table()), ("tree", tree())):
        pattern = rf"(<!-- {name}[^>]*-->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda m, b=block: m[1] + b + m[2], text, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"README.md has {count} blocks {name}, not one")
    return text


def settings_table() -> str:
    """One row for each setting of the server: dotted name, default, meaning."""
    docs, defaults = setting_docs(ServerConfig), ServerConfig()
    rows = ["| setting | default | |", "|---|---|---|"]
    for setting, kind in field_names(ServerConfig).items():
        default = _shown(attrgetter(setting)(defaults))
        meaning = docs[setting].replace("|", "\\|")
        if typing.get_origin(kind) is typing.Literal:
            meaning = f"{meaning} One of {', '.join(f'`{c}`' for c in typing.get_args(kind))}."
        rows.append(f"| `{setting}` | {default} | {meaning} |")
    return "\n".join(rows) + "\n"


def tree() -> str:
    """One line for each file of the packages, and for each folder beside them."""
    lines = []
    for name, note in NOTES.items():
        path = ROOT / name
        if not path.exists():
            continue
        depth = name.count("/") if name.startswith("jaxmm/") else 0
        shown = f"{path.name if depth else name}/" if path.is_dir() else name
        lines.append(_line(depth, shown, note))
        if name in OPEN or name.startswith("jaxmm/models/"):
            lines += [_line(depth + 1, *entry) for entry in _entries(path)]
    return "```\n" + "\n".join(lines) + "\n```\n"


def _entries(folder: Path) -> list[tuple[str, str]]:
    """Modules of a folder, and folders that have no line of their own in `NOTES`."""
    entries = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.name != "__init__.py":
            entries.append((path.name, _first_line(path)))
        elif (path / "__init__.py").exists() and path.relative_to(ROOT).as_posix() not in NOTES:
            entries.append((f"{path.name}/", _first_line(path / "__init__.py")))
    return entries


def _first_line(module: Path) -> str:
    """What a module's docstring says first, without where it runs."""
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    first = docstring.split("\n", 1)[0]
    return re.sub(r"\.? ?(Host only|Traced)\b.*$|\.$", "", first)


def _line(depth: int, name: str, note: str) -> str:
    return f"{'  ' * depth + name:<{WIDTH}}{note}".rstrip()


def _shown(default: object) -> str:
    match default:
        case "" | ():
            return "empty"
        case bool():
            return f"`{str(default).lower()}`"
        case tuple():
            return f"`{','.join(map(str, default))}`"
    return f"`{default}`"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
