"""The command line: jaxmm serve | generate | buckets | plan | convert | deploy. Host only."""

import argparse
import asyncio
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxmm.errors import JaxmmError
from jaxmm.request import Delta, Request, SamplingParams
from serving.config import ENGINE_PREFIX, ServerConfig, load_server_config
from serving.deploy.command import add_deploy_commands
from serving.engine import (
    LoadEngine,
    convert_model,
    describe_buckets,
    describe_plan,
    followed,
    load_engine,
    load_or_end,
)
from serving.flags import add_flags, given_settings


def main(arguments: Sequence[str] | None = None, load: LoadEngine = load_engine) -> int:
    """Run one command; give the exit status.

    Args:
        arguments: Words after `jaxmm`; None: those of the process.
        load: What builds the engine.
    """
    parsed = _parser().parse_args(arguments)
    try:
        config = load_server_config(parsed.config, given_settings(parsed, ServerConfig))
        parsed.run(parsed, config, load)
    except JaxmmError as e:
        print(f"jaxmm: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class _Parser(argparse.ArgumentParser):
    """Takes flags by their whole names: what one is short for changes with the settings."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxmm", description="Multimodal serving on JAX.")
    parser.add_argument("--version", action="version", version=f"jaxmm {version('jaxmm')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="start the HTTP server")
    serve.set_defaults(run=_serve)
    add_flags(serve, ServerConfig)
    generate = commands.add_parser("generate", help="answer one question here")
    generate.set_defaults(run=_generate)
    generate.add_argument("question")
    generate.add_argument("--image", type=Path, action="append", default=[], metavar="FILE")
    generate.add_argument("--video", type=Path, action="append", default=[], metavar="FILE")
    generate.add_argument("--stream", action="store_true", help="write the answer as it comes")
    _add_sampling(generate)
    add_flags(generate, ServerConfig, ENGINE_PREFIX)
    buckets = commands.add_parser("buckets", help="show what would be compiled, and the padding")
    buckets.set_defaults(run=_buckets)
    add_flags(buckets, ServerConfig, ENGINE_PREFIX)
    plan = commands.add_parser("plan", help="show what a model takes on TPUs that are not here")
    plan.set_defaults(run=_plan)
    plan.add_argument("--topology", required=True, metavar="v5e:4x8", help="TPU slice")
    plan.add_argument(
        "--length",
        type=int,
        action="append",
        metavar="N",
        help="tokens of a request to count room for, prompt and output; may be repeated",
    )
    plan.add_argument(
        "--suggest", action="store_true", help="rank the splits of the slice, and plan the best"
    )
    add_flags(plan, ServerConfig, ENGINE_PREFIX)
    for command in (serve, generate, buckets, plan):
        command.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML")
    convert = commands.add_parser("convert", help="write a checkpoint that hosts restore by parts")
    convert.set_defaults(run=_convert, config=None)
    convert.add_argument("model", metavar="MODEL", help="directory of a Hugging Face checkpoint")
    convert.add_argument("out", metavar="OUT", help="new directory, or a gs:// address")
    convert.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    add_deploy_commands(commands.add_parser("deploy", help="put the server on TPUs"))
    return parser


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    defaults = SamplingParams()
    group.add_argument("--max-tokens", type=int, default=defaults.max_tokens, metavar="N")
    group.add_argument("--temperature", type=float, default=defaults.temperature, metavar="X")
    group.add_argument("--top-p", type=float, default=defaults.top_p, metavar="X")
    group.add_argument("--top-k", type=int, default=defaults.top_k, metavar="N")
    group.add_argument("--seed", type=int, metavar="N")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT")


def _serve(_: argparse.Namespace, config: ServerConfig, load: LoadEngine) -> None:
    from serving.main import serve  # brings the web framework

    serve(config, load)


def _buckets(_: argparse.Namespace, config: ServerConfig, __: LoadEngine) -> None:
    print(describe_buckets(config.engine))


def _plan(parsed: argparse.Namespace, config: ServerConfig, _: LoadEngine) -> None:
    given = given_settings(parsed, ServerConfig)
    describe_plan(
        config.engine,
        parsed.topology,
        parsed.length,
        tensor_parallel=int(given.get(ENGINE_PREFIX + "tensor_parallel", 0)),
        suggest=parsed.suggest,
        show=print,
    )


def _convert(parsed: argparse.Namespace, *_: object) -> None:
    convert_model(parsed.model, parsed.out, parsed.dtype, progress=sys.stderr.isatty())
    print(f"jaxmm serve --model {shlex.quote(parsed.out)}")


def _generate(parsed: argparse.Namespace, config: ServerConfig, load: LoadEngine) -> None:
    if followed(config.engine):
        return
    request = _request(parsed)
    engine = load_or_end(load, config.engine)
    try:
        asyncio.run(_print_answer(engine.astream(request), parsed.stream))
    finally:
        engine.close()


def _request(parsed: argparse.Namespace) -> Request:
    parts: list[dict[str, str]] = [{"type": "image"}] * len(parsed.image)
    parts += [{"type": "video"}] * len(parsed.video)
    parts.append({"type": "text", "text": parsed.question})
    return Request(
        id="generate",
        messages=[{"role": "user", "content": parts}],
        images=tuple(parsed.image),
        videos=tuple(parsed.video),
        sampling=SamplingParams(
            max_tokens=parsed.max_tokens,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            top_k=parsed.top_k,
            seed=parsed.seed,
            stop=tuple(parsed.stop),
        ),
    )


async def _print_answer(deltas: AsyncIterator[Delta], stream: bool) -> None:
    texts = []
    async for delta in deltas:
        texts.append(delta.text)
        if stream:
            print(delta.text, end="", flush=True)
    print("" if stream else "".join(texts))


if __name__ == "__main__":
    sys.exit(main())
