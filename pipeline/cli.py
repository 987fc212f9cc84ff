"""The command `callsieve`: one command per verb; nothing but parsing and printing.

Exit codes: 0 done; 1 the work failed (the same command continues); 2 wrong usage or configuration;
130 interrupted. Results go to stdout, progress and messages to stderr.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.agent.verbs import add_agent_verbs
from pipeline.arguments import (
    add_json,
    add_verb,
    day,
    load_silently,
    overrides,
    positive,
    print_json,
    shards,
    tool_list,
)
from pipeline.errors import ConfigError, WorkError
from pipeline.usage import Parser, add_bench, add_generate

STAGES = ("ingest", "sample", "execute", "score", "select", "augment", "finetune", "evaluate")
_STAGE_ABOUT = {
    "ingest": "read the corpus into documents (files, globs, Hugging Face data sets)",
    "sample": "sample candidate calls at the positions where the model would call a tool",
    "execute": "run the candidate calls with the real tools",
    "score": "compute the weighted losses and the gain of every executed call",
    "select": "keep the calls that pass the threshold and the rules (seconds; no model)",
    "augment": "write the data set: texts with their surviving calls",
    "finetune": "fine-tune the model on it, and its control on the same texts without calls",
    "evaluate": "compare the four arms on questions with live calls, and on perplexity",
}


_CONFIG = "a YAML file such as configs/quickstart.yaml"
_RUN = "a run folder, e.g. runs/quickstart"
_TOOLS_OF = "take the tools of this configuration (default: those that need no settings)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    _prepare_libraries()
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    try:
        if rest and not getattr(args, "overrides", False):
            args.parser.error(f"unrecognised arguments: {' '.join(rest)}")
        args.rest = rest
        return int(args.run(args) or 0)
    except ConfigError as error:
        print(f"callsieve: {error}", file=sys.stderr)
        return 2
    except WorkError as error:
        print(f"callsieve: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, sqlite3.OperationalError) as error:  # SQLite: the cache of the tools' results
        more = ". What is finished is kept; mend this and run the same command again to continue."
        print(f"callsieve: {error}{more if _in_run(args) else ''}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        more = "; finished shards are kept, the same command continues"
        print(f"\ncallsieve: interrupted{more if _in_run(args) else ''}", file=sys.stderr)
        return 130


def _prepare_libraries() -> None:
    """Set what libraries look for when they are imported; their bars do not go into a log."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # also those of transformers
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def _in_run(args: Any) -> bool:
    """Tell whether a command runs stages, which a second time goes on where it stopped."""
    return args.run in (_run, _stage)


# -- parsing -------------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser(
        prog="callsieve",
        description="A language model teaches itself when a tool helps (Toolformer, end to end).",
    )
    parser.add_argument("--version", action="version", version=f"callsieve {__version__}")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_stages(verbs)
    _add_views(verbs)
    _add_tools(verbs)
    add_agent_verbs(verbs)
    generate = add_verb(verbs, "generate", _generate, "continue a text with live calls")
    add_generate(generate)
    add_json(generate)
    bench = add_verb(verbs, "bench", _bench, "measure our paths against baselines, in one run")
    add_bench(bench)
    add_json(bench)
    return parser


def _add_stages(verbs: Any) -> None:
    run = add_verb(verbs, "run", _run, "run all stages; continues where it stopped")
    run.add_argument("config", help=_CONFIG)
    run.add_argument("--run-dir", type=Path, help="where the run is kept (default: runs/NAME)")
    run.add_argument(
        "--until",
        choices=STAGES,
        metavar="STAGE",
        help=f"stop after this stage: {', '.join(STAGES)} (default: the last)",
    )
    run.add_argument(
        "--from",
        dest="first",
        choices=STAGES,
        metavar="STAGE",
        help="start at this stage; those before it have to be done (default: the first)",
    )
    _add_shards(run)
    _take_overrides(run)
    for stage in STAGES:
        one = add_verb(verbs, stage, _stage, _STAGE_ABOUT[stage])
        one.add_argument("config", help=_CONFIG)
        one.add_argument("--run-dir", type=Path, required=True, help="the run, e.g. runs/NAME")
        if stage in ("sample", "execute", "score"):
            _add_shards(one)
        if stage == "augment":
            one.add_argument(
                "--from-traces",
                metavar="FILE",
                help="make the data set of the right runs in a traces file of the agent loop "
                "(the same as --augment.traces FILE; give that to `run` for the stages after it)",
            )
        if stage == "evaluate":
            one.add_argument("--json", action="store_true", help="print the results as JSON")
        one.set_defaults(stage=stage)
        _take_overrides(one)


def _add_views(verbs: Any) -> None:
    status = add_verb(verbs, "status", _status, "stages, shards done, rows, time, estimate")
    status.add_argument("run_dir", type=Path, help=_RUN)
    add_json(status)
    show = add_verb(verbs, "show", _show, "calls in their context with all losses")
    show.add_argument("run_dir", type=Path, help=_RUN)
    show.add_argument("--tool", help="only calls of this tool (default: all)")
    show.add_argument(
        "--reason",
        help="only calls with this reason: kept, below_threshold, lookahead_leak, duplicate, "
        "conflict, over_cap or tool_error (default: all)",
    )
    show.add_argument(
        "--sort",
        default="gain",
        metavar="COLUMN",
        help="largest first: gain, gain_null, p_api, loss_none, loss_call, loss_result (nats, but "
        "p_api), sample_count, seconds; or position: as in the texts",
    )
    show.add_argument("-n", type=positive, default=10, metavar="N", help="how many calls")
    show.add_argument("--call", metavar="ID", help="one call by its id, or the start of it")
    add_json(show)
    report = add_verb(verbs, "report", _report, "write report.html of a run, or a trace as a page")
    report.add_argument(
        "path",
        type=Path,
        help="a run folder, or a trace: a file of `agent run --trace` or agent-traces.jsonl",
    )
    export = add_verb(verbs, "export", _export, "write the augmented texts in another form")
    export.add_argument("run_dir", type=Path, help=_RUN)
    export.add_argument(
        "--format",
        required=True,
        help="jsonl or parquet: a row for each text; chat-messages: a conversation for each call",
    )
    export.add_argument(
        "--output", "-o", type=Path, metavar="FILE", help="(default: export.* in the run folder)"
    )
    diff = add_verb(
        verbs, "diff", _diff, "what two runs keep differently, and which settings differ"
    )
    diff.add_argument("run_a", type=Path, help=_RUN)
    diff.add_argument("run_b", type=Path, help="another one")
    add_json(diff)


def _add_tools(verbs: Any) -> None:
    about = "the catalogue: list, call, serve"
    tools = verbs.add_parser("tools", help=about, description="The tools: list, call, serve.")
    tools = tools.add_subparsers(metavar="WHAT", required=True)
    listing = add_verb(tools, "list", _tools_list, "what there is, with arguments and descriptions")
    call = add_verb(tools, "call", _tools_call, "run one call, as the pipeline would")
    call.add_argument("name", help="e.g. Calculator (any case)")
    call.add_argument("arguments", help="the text between the brackets, or a JSON object")
    call.add_argument(
        "--date",
        type=day,
        help="the document's date, e.g. 2023-01-30 (default: none; Calendar then says today's)",
    )
    serve = add_verb(tools, "serve", _tools_serve, "offer the tools over MCP")
    serve.add_argument(
        "--http",
        type=int,
        metavar="PORT",
        help="over HTTP on this port of the loopback (default: over standard input and output)",
    )
    for parser in (listing, call, serve):
        parser.add_argument("--config", metavar="FILE", help=_TOOLS_OF)
    add_json(listing)
    add_json(call)


def _say(message: str) -> None:
    print(f"callsieve: {message}", file=sys.stderr)


def _take_overrides(parser: Any) -> None:
    parser.set_defaults(overrides=True)
    more = "Any value of the configuration can be given as --section.key VALUE."
    parser.epilog = f"{more}\n{parser.epilog}"


def _add_shards(parser: Any) -> None:
    parser.add_argument(
        "--shards",
        type=shards,
        default=(0, 1),
        metavar="i/n",
        help="only the shards whose number is i modulo n, i from 0 (for job arrays; default: all); "
        "a single number sets `shards` of the configuration",
    )


# -- the pipeline --------------------------------------------------------------------------------


def _load(args: Any) -> tuple[Any, Any]:
    from pipeline.config import load_config
    from pipeline.shards import RunFolder

    changes = overrides(args.rest)
    if isinstance(getattr(args, "shards", None), int):
        changes.append(("shards", str(args.shards)))
        args.shards = (0, 1)
    if getattr(args, "from_traces", None):
        changes.append(("augment.traces", json.dumps(args.from_traces)))
    config = load_config(args.config, changes)
    return config, RunFolder(args.run_dir or Path("runs") / config.name)


def _run(args: Any) -> int:
    config, folder = _load(args)
    if args.first and args.until and STAGES.index(args.first) > STAGES.index(args.until):
        raise ConfigError(f"--from {args.first} comes after --until {args.until}")
    from pipeline import runner

    runner.run(config, folder, first=args.first, last=args.until, shards=args.shards)
    _summary(folder)
    return 0


def _stage(args: Any) -> int:
    config, folder = _load(args)
    from pipeline import runner

    shards = getattr(args, "shards", (0, 1))
    runner.run(config, folder, first=args.stage, last=args.stage, shards=shards)
    if getattr(args, "json", False):
        from pipeline.shards import read_json

        print_json(read_json(folder.stage("evaluate") / "results.json"))
    return 0


def _summary(folder: Any) -> None:
    """What a run ends with: funnel, best calls, near misses, the four arms, the report."""
    from pipeline.report.summary import print_summary

    print_summary(folder)


def _existing(path: Path) -> Any:
    from pipeline.shards import RunFolder

    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path}: not a run folder (it holds no config.yaml)")
    return RunFolder(path)


def _status(args: Any) -> None:
    from pipeline.report.status import status_document, wanted
    from pipeline.report.terminal import print_status

    folder = _existing(args.run_dir)
    document = status_document(folder, wanted(folder, _say))
    print_json(document) if args.json else print_status(document)


def _show(args: Any) -> None:
    from pipeline.report.rows import show_rows, what_there_is
    from pipeline.report.terminal import print_calls

    folder = _existing(args.run_dir)
    rows = show_rows(
        folder,
        tool=args.tool,
        reason=args.reason,
        sort=args.sort,
        n=args.n,
        call=args.call,
    )
    print_json(rows) if args.json else print_calls(rows)
    if not rows and not args.json:
        print("calls of this run:")
        for tool, reasons in what_there_is(folder).items():
            print(f"  {tool}: {', '.join(f'{reason} {n:,}' for reason, n in reasons.items())}")


def _report(args: Any) -> None:
    from pipeline.report.page import write_report
    from pipeline.report.trace_page import write_trace_report

    path: Path = args.path
    if not path.exists():
        raise ConfigError(f"{path}: neither a run folder nor a trace file")
    print(write_trace_report(path) if path.is_file() else write_report(_existing(path)))


def _export(args: Any) -> None:
    from pipeline.report.export import describe_export, export_run
    from pipeline.report.status import warn_of_stale

    folder = _existing(args.run_dir)
    path = export_run(folder, args.format, args.output)
    warn_of_stale(folder, "augment", _say)
    print(path)
    print(describe_export(folder, args.format, path), file=sys.stderr)


def _diff(args: Any) -> None:
    from pipeline.report.diff import diff_runs, print_diff

    document = diff_runs(_existing(args.run_a), _existing(args.run_b))
    print_json(document) if args.json else print_diff(document)


# -- tools, generation, bench -------------------------------------------------------------


def _tools_list(args: Any) -> None:
    from pipeline.config import load_tools
    from pipeline.report.catalogue import print_tools, tools_document
    from pipeline.tools.listing import list_built_in, list_tools

    tools = list_tools(load_tools(args.config)) if args.config else list_built_in()
    document = tools_document(tools)
    print_json(document) if args.json else print_tools(document)


def _tools_call(args: Any) -> int:
    from pipeline.tools.executor import Executor

    arguments: Any = args.arguments
    if arguments.lstrip().startswith("{"):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise ConfigError(f"the arguments are not JSON: {error}") from None
    with Executor(tool_list(args.config, args.name if not args.config else None)) as executor:
        done = executor.execute(args.name, arguments, {"date": args.date, "doc_id": ""})
    if args.json:
        print_json({"result": done.result, "error_kind": done.error_kind, "error": done.error})
        return 0
    if done.error_kind is not None:
        raise WorkError(f"{done.error_kind}: {done.error}")
    print(done.result)
    return 0


def _tools_serve(args: Any) -> None:
    from pipeline.tools.serve import serve

    serve(tool_list(args.config), args.http)


def _generate(args: Any) -> int:
    from rich.console import Console

    from pipeline.evaluation.live import generate_text, too_long
    from pipeline.report.stream import GenerationStream
    from pipeline.report.terminal import print_generation
    from pipeline.tools.executor import Executor

    load_silently()
    live = sys.stdout.isatty() and not args.json
    stream = GenerationStream(args.prompt, Console()) if live else None
    executor = None
    if args.tools or args.config:
        executor = Executor(tool_list(args.config, args.tools))
    made = generate_text(
        args.model,
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        date=args.date,
        call_k=args.call_k,
        max_calls=args.max_calls,
        enabled=not args.no_calls,
        constrain=args.constrain,
        executor=executor,
        on_text=stream.on_text if stream else None,
    )
    if args.json:
        print_json({"prompt": args.prompt, **dataclasses.asdict(made)})
    elif stream:
        stream.finish(made)
    else:
        print_generation(args.prompt, made)
    if made.finish == "context" and made.tokens_out == 0:
        raise WorkError(too_long(args.model, made.tokens_in))
    return 0


def _bench(args: Any) -> None:
    from pipeline.bench import print_bench, run_bench

    document = run_bench(args.name, args.model, args.pairs, args.documents, args.tokens)
    print_json(document) if args.json else print_bench(document)


if __name__ == "__main__":
    raise SystemExit(main())
