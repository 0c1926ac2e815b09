"""The command line: `python -m benchmarks list | run | ranks | start | merge | plans | scaling | fits | report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import fits, plans, ranks, report, run, scaling, start, table
from benchmarks.cases import CASES, ENGINES
from benchmarks.rank_cases import RANK_CASES, RANK_ENGINES

_FROM = ("disk", "random", "command")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Every figure of the documents.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names of cases and engines")
    measuring = commands.add_parser("run", help="measure, each engine alone in a fresh process; appends rows")
    measuring.add_argument("case", nargs="+", choices=CASES, metavar="CASE", help="see `list`")
    measuring.add_argument("--engines", nargs="+", choices=ENGINES, default=(), metavar="ENGINE", help="see `list`")
    measuring.add_argument("--turns", type=int, default=1, help="fresh processes for each engine")
    measuring.add_argument("--steps", type=int, default=run.STEPS, help="timed steps of a process")
    measuring.add_argument("--timeout", type=float, default=600.0, help="seconds for one process")
    measuring.add_argument("--device", choices=("cpu",), help="cpu hides the GPU")
    measuring.add_argument("--commit", help="commit to write down where git is missing")
    measuring.add_argument("--notes", default="", help="a remark in each row")
    measuring.add_argument("--verbose", action="store_true", help="show what the engines print")
    several = commands.add_parser("ranks", help="measure on several GPUs of this machine; appends rows")
    several.add_argument("case", nargs="*", choices=[*RANK_CASES, []], metavar="CASE", help="see --plan")
    several.add_argument("--plan", action="store_true", help="print what the plan says of the cases; nothing runs")
    several.add_argument("--engines", nargs="+", choices=RANK_ENGINES, default=(), metavar="ENGINE")
    several.add_argument("--turns", type=int, default=1, help="fresh processes for each engine")
    several.add_argument("--steps", type=int, default=run.STEPS, help="timed steps of a process")
    several.add_argument("--verbose", action="store_true", help="show what rank 0 prints")
    several.add_argument("--notes", default="", help="a remark in each row")
    several.add_argument("--seconds", type=float, default=float("inf"), help="for all of it")
    several.add_argument("--device", choices=("cpu",), help="cpu hides the GPUs")
    several.add_argument("--commit", help="commit to write down where git is missing")
    planning = commands.add_parser("plans", help="plan for the machine of a measured row; appends planned rows")
    planning.add_argument("case", nargs="*", choices=[*CASES, []], metavar="CASE", help="default: cases of claim fit")
    planning.add_argument("--commit", help="commit to write down where git is missing")
    starting = commands.add_parser(
        "start", help="measure the seconds to the end of the first step, by phase; appends rows"
    )
    starting.add_argument("model", nargs="?", default="t5-3b", help="t5-3b, ...: a model of the cases")
    starting.add_argument("--from", nargs="+", choices=_FROM, default=_FROM, dest="sources")
    starting.add_argument("--vram", help="budget, such as 8GiB; default: what is free")
    starting.add_argument("--ram", help="budget, such as 64GiB; default: what is free")
    starting.add_argument("--batch-size", type=int, default=8, help="rows in the micro-batch")
    starting.add_argument("--turns", type=int, default=2, help="fresh processes for each")
    starting.add_argument("--device", choices=("cpu",), help="cpu hides the GPU")
    starting.add_argument("--commit", help="commit to write down where git is missing")
    starting.add_argument("--notes", default="", help="a remark in each row")
    merging = commands.add_parser("merge", help="append the rows of another table, which ran elsewhere")
    merging.add_argument("table", type=Path)
    commands.add_parser("scaling", help="plan for up to 64 GPUs; writes the tables of docs/several-gpus.md")
    commands.add_parser("fits", help="plan models for cards by data sheets; writes the README's table")
    commands.add_parser("report", help="write docs/results.md, the README's marked parts and the chart")
    for command in (measuring, several, planning, starting, merging):
        command.add_argument("--out", type=Path, default=table.PATH, help="the table (default: benchmarks/results.csv)")
    options = vars(parser.parse_args(arguments))
    chosen = options.pop("command")
    if chosen == "list":
        for name, case in CASES.items():
            print(f"{name}: {case.claim}, {case.model}, {case.shape}, {case.mask}; {' '.join(case.engines)}")
        print("engines:", *ENGINES)
    elif chosen == "run":
        run.run(options.pop("case"), **options)
    elif chosen == "ranks":
        cases = options.pop("case")
        if options.pop("plan"):
            for line in ranks.planned(cases):
                print(line, flush=True)
        else:
            ranks.run(cases, **options)
    elif chosen == "start":
        start.start(options.pop("model"), **options)
    elif chosen == "merge":
        rows = table.read(options["out"])
        table.write([*rows, *(row for row in table.read(options["table"]) if row not in rows)], options["out"])
    elif chosen == "plans":
        plans.plan_cases(options.pop("case"), **options)
    elif chosen == "scaling":
        scaling.PAGE.write_text(scaling.page())
    elif chosen == "fits":
        fits.README.write_text(fits.page())
    else:
        report.write()


if __name__ == "__main__":
    main()
