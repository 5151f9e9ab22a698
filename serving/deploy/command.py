"""jaxmm deploy render: flags to a manifest on the standard output. Host only."""

import argparse
import sys
from dataclasses import MISSING, fields

from serving.deploy.render import Deployment, render
from serving.deploy.topology import parse_topology
from serving.flags import setting_docs


def add_deploy_commands(deploy: argparse.ArgumentParser) -> None:
    """Add `render` to `jaxmm deploy`."""
    commands = deploy.add_subparsers(required=True, metavar="COMMAND")
    parser = commands.add_parser("render", help="write a GKE manifest")
    parser.add_argument("--topology", required=True, metavar="v5e:4x8", help="TPU slice")
    docs = setting_docs(Deployment)
    for f in fields(Deployment):
        if f.name in ("topology", "server"):
            continue
        flag, text = "--" + f.name.replace("_", "-"), docs[f.name]
        if f.default is MISSING:
            parser.add_argument(flag, required=True, metavar="TEXT", help=text)
        elif f.default is False:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            kind = type(f.default)
            metavar = "N" if kind is int else "TEXT"
            shown = f"{text} [{f.default!r}]"
            parser.add_argument(flag, type=kind, default=f.default, metavar=metavar, help=shown)
    parser.add_argument("server", nargs="*", metavar="-- FLAG …", help=docs["server"])
    parser.set_defaults(run=_render, config=None)


def _render(parsed: argparse.Namespace, *_: object) -> None:
    values = {f.name: getattr(parsed, f.name) for f in fields(Deployment)}
    values |= {"topology": parse_topology(parsed.topology), "server": tuple(parsed.server)}
    sys.stdout.write(render(Deployment(**values)))
