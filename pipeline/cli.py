"""The command `callsieve`: one command per verb; nothing but parsing and printing.

Exit codes: 0 done; 1 the work failed (the same command continues); 2 wrong usage or configuration;
130 interrupted. Results go to stdout, progress and messages to stderr.
"""

from __future__ import annotations

import argparse
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

STAGES = ("ingest", "sample", "execute", "score", "select", "augment", "finetune", "evaluate")
_ABOUT = {
    "ingest": "read the corpus into documents (files, globs, Hugging Face data sets)",
    "sample": "sample candidate calls at the positions where the model would call a tool",
    "execute": "run the candidate calls with the real tools",
    "score": "compute the weighted losses and the gain of every executed call",
    "select": "keep the calls that pass the threshold and the rules (seconds; no model)",
    "augment": "write the data set: texts with their surviving calls",
    "finetune": "fine-tune the model on it, and its control on the same texts without calls",
    "evaluate": "compare the four arms on questions with live calls, and on perplexity",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    _prepare_libraries()
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    try:
        if rest and not getattr(args, "overrides", False):
            parser.error(f"unrecognised arguments: {' '.join(rest)}")
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="callsieve",
        description="A language model teaches itself when a tool helps (Toolformer, end to end).",
        epilog="Start with: callsieve run configs/quickstart.yaml",
    )
    parser.add_argument("--version", action="version", version=f"callsieve {__version__}")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)

    run = add_verb(verbs, "run", _run, "run all stages; continues where it stopped")
    run.add_argument("config", help="a YAML file such as configs/quickstart.yaml")
    run.add_argument("--run-dir", type=Path, help="where the run is kept (default: runs/NAME)")
    run.add_argument("--until", choices=STAGES, help="stop after this stage")
    run.add_argument("--from", dest="first", choices=STAGES, help="start at this stage")
    _add_shards(run)
    _takesoverrides(run)
    for stage in STAGES:
        one = add_verb(verbs, stage, _stage, _ABOUT[stage])
        one.add_argument("config", help="a YAML file such as configs/quickstart.yaml")
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
        _takesoverrides(one)

    status = add_verb(verbs, "status", _status, "stages, shards done, rows, time, estimate")
    status.add_argument("run_dir", type=Path)
    add_json(status)
    show = add_verb(verbs, "show", _show, "calls in their context with all losses")
    show.add_argument("run_dir", type=Path)
    show.add_argument("--tool", help="only this tool")
    show.add_argument("--reason", help="only calls with this reason, e.g. kept, lookahead_leak")
    show.add_argument("--sort", default="gain", help="column to sort by, largest first")
    show.add_argument("-n", type=positive, default=10, help="how many")
    show.add_argument("--call", help="one call by its id (or the start of it)")
    add_json(show)
    report = add_verb(verbs, "report", _report, "write report.html of a run, or a trace as a page")
    report.add_argument(
        "path",
        type=Path,
        help="a run folder, or a trace: a file of `agent run --trace` or agent-traces.jsonl",
    )
    export = add_verb(verbs, "export", _export, "write the augmented texts in another form")
    export.add_argument("run_dir", type=Path)
    export.add_argument("--format", required=True, help="jsonl, parquet or chat-messages")
    export.add_argument("--output", "-o", type=Path, help="file (default: in the run folder)")
    diff = add_verb(
        verbs, "diff", _diff, "what two runs keep differently, and which settings differ"
    )
    diff.add_argument("run_a", type=Path)
    diff.add_argument("run_b", type=Path)
    add_json(diff)

    _tools_parser(verbs)
    add_agent_verbs(verbs)
    generate = add_verb(verbs, "generate", _generate, "continue a text with live calls")
    generate.add_argument("model", help="a tuned model, e.g. runs/quickstart/07-model")
    generate.add_argument("prompt")
    generate.add_argument("--tools", help="comma-separated (default: those of the checkpoint)")
    generate.add_argument("--config", help="take the tools' settings from this configuration")
    generate.add_argument("--date", type=day, help="the date of today for Calendar, ISO")
    generate.add_argument("--max-new-tokens", type=positive, default=48)
    generate.add_argument(
        "--call-k", type=int, help="a call starts when [ is among the k likeliest"
    )
    generate.add_argument("--max-calls", type=int, default=1)
    generate.add_argument("--no-calls", action="store_true", help="never start a call")
    generate.add_argument(
        "--constrain",
        action="store_true",
        help="a call that has begun cannot be malformed: only tokens that continue a call of one "
        "of the tools are let through, up to the arrow (its values may still be wrong)",
    )
    add_json(generate)
    bench = add_verb(verbs, "bench", _bench, "measure our paths against baselines, in one run")
    bench.add_argument("name", choices=("ingest", "sample", "score", "train", "agent"))
    bench.add_argument("--model", default=".cache/models/SmolLM2-135M-Instruct")
    bench.add_argument("--pairs", type=int, default=5, help="interleaved pairs per baseline")
    bench.add_argument("--documents", type=int, help="how many documents a pair works on")
    bench.add_argument("--tokens", type=int, help="tokens per document")
    add_json(bench)
    return parser


def _tools_parser(verbs: Any) -> None:
    tools = verbs.add_parser("tools", help="the catalogue: list, call, serve").add_subparsers(
        metavar="WHAT", required=True
    )
    listing = add_verb(tools, "list", _tools_list, "what there is, with arguments and descriptions")
    call = add_verb(tools, "call", _tools_call, "run one call, as the pipeline would")
    call.add_argument("name", help="e.g. Calculator (any case)")
    call.add_argument("arguments", help="the text between the brackets, or a JSON object")
    call.add_argument("--date", type=day, help="the document's date, ISO")
    serve = add_verb(tools, "serve", _tools_serve, "offer the tools over MCP (stdio, or HTTP)")
    serve.add_argument("--http", type=int, metavar="PORT", help="on the loopback, this port")
    for parser in (listing, call, serve):
        parser.add_argument("--config", help="take the tools from this configuration")
    add_json(listing)
    add_json(call)


def _takesoverrides(parser: Any) -> None:
    parser.set_defaults(overrides=True)
    parser.epilog = "Any value of the configuration can be given as --section.key VALUE."


def _add_shards(parser: Any) -> None:
    parser.add_argument(
        "--shards",
        type=shards,
        default=(0, 1),
        metavar="i/n",
        help="only the shards whose number is i modulo n, i from 0 (for job arrays); a single "
        "number sets `shards` of the configuration",
    )


def _say(message: str) -> None:
    print(f"callsieve: {message}", file=sys.stderr)


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
