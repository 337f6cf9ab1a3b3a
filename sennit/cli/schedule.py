"""`sennit schedule`: make a pipeline schedule, prove it, time it, draw it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sennit.errors import ConfigError

if TYPE_CHECKING:
    from sennit.pipeline.schedule import Schedule
    from sennit.pipeline.simulate import Costs

COST_FIELDS = ("forward", "input", "weight")


def schedule(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="gpipe 1f1b interleaved zb-h1 zb-h2 zb-v v-half v-min dualpipe dualpipev, or adaptive (made for --costs).",
        ),
    ],
    ranks: Annotated[int, typer.Option("--ranks", metavar="P", help="Pipeline ranks.")],
    microbatches: Annotated[int, typer.Option("--microbatches", metavar="M", help="Microbatches of a step.")],
    virtual_stages: Annotated[
        int, typer.Option("--virtual-stages", metavar="V", help="Chunks of layers a rank has; 0 = the schedule's.")
    ] = 0,
    forward: Annotated[float, typer.Option(help="Time of a forward of the layers of one rank.")] = 1.0,
    input_: Annotated[float, typer.Option("--input", help="Time of its backward for inputs.")] = 1.0,
    weight: Annotated[float, typer.Option(help="Time of its backward for weights.")] = 1.0,
    send: Annotated[float, typer.Option(help="Time until another rank has a result.")] = 0.0,
    costs_file: Annotated[
        Path | None,
        typer.Option("--costs", metavar="FILE", help="JSON with forward, input, weight: a number for each stage; send."),
    ] = None,
    pairs: Annotated[bool, typer.Option("--pairs/--no-pairs", help="Run forwards and backwards in pairs.")] = False,
    hidden: Annotated[float, typer.Option(help="Share of a pair's time that running it together saves.")] = 0.0,
    memory_limit: Annotated[
        float | None, typer.Option("--memory-limit", help="Most activations a rank holds, in (L/p layers) x microbatches.")
    ] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the order in torch's notation.")] = None,
    from_csv: Annotated[
        Path | None, typer.Option("--from-csv", metavar="FILE", help="Read the order from such a file; NAME is a label.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw the timeline.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Draw it as a page.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="Write a trace for Perfetto.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print a picture in characters.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON document.")] = False,
) -> None:
    """Make a pipeline schedule, prove that it runs, time it, and compare it with its formula.

    Without options, a forward and both halves of a backward take one unit each, and pairs run one after the other.
    """
    from sennit.pipeline.simulate import Costs, overlapped, scaled, simulate
    from sennit.pipeline.verify import required_window, verify

    if not 0 <= hidden < 1 or min(forward, input_, weight, send) < 0:
        raise ConfigError("Times must not be negative, and --hidden is a share from 0 to below 1.")
    made = _read(from_csv, name) if from_csv else None
    if made is None and name != "adaptive":
        from sennit.pipeline.catalog import make

        made = make(name, ranks, microbatches, virtual_stages, pairs=pairs)
    costs = _costs(costs_file, made, ranks, virtual_stages) or (
        None if made is None else Costs.uniform(made, forward, input_, weight, send)
    )
    if made is None:
        made, costs = _adapted(ranks, microbatches, virtual_stages, costs, (forward, input_, weight, send), memory_limit)
    assert costs is not None
    proof = verify(made, window=max(required_window(made), 1), memory_limit=memory_limit)
    timeline = simulate(made, costs, pair_time=scaled(costs, 1.0 - hidden) if hidden else overlapped(costs))
    formula = None
    if costs_file is None and from_csv is None and hidden == 0 and send == 0 and name != "adaptive":
        formula = _formula(name, made, virtual_stages, forward, input_, weight, pairs)
    ideal = sum(sum(costs.of(op) for op in made.compute(rank)) for rank in range(made.num_ranks)) / made.num_ranks
    document: dict[str, Any] = {
        "name": made.name,
        "ranks": made.num_ranks,
        "microbatches": made.num_microbatches,
        "verified": True,
        "makespan": timeline.makespan,
        "ideal": ideal,
        "bubble": 1.0 - ideal / timeline.makespan if timeline.makespan else 0.0,
        "peak_activations": list(proof.peak_activations),
        "parameters": list(proof.parameter_copies),
        "window": max(required_window(made), 1),
        "digest": made.digest,
        "formula": formula,
    }
    _write(made, timeline, csv, png, html, trace)
    if json_output:
        json.dump(document, sys.stdout)
        sys.stdout.write("\n")
        return
    _print(document)
    if text:
        from sennit.pipeline.text import to_text

        print(to_text(made))


def _read(path: Path, name: str) -> Schedule:
    from sennit.pipeline.text import from_csv

    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Give a CSV file, for example one that --csv wrote.") from None
    return from_csv(content, name=name)


def _costs(path: Path | None, made: Schedule | None, ranks: int, virtual_stages: int) -> Costs | None:
    """Return the costs of a file. Raises ConfigError if it is no such file or has other numbers of stages."""
    from sennit.pipeline.simulate import Costs

    if path is None:
        return None
    stages = made.num_stages if made is not None else ranks * max(virtual_stages, 2)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        forward, input_, weight = (tuple(float(x) for x in document[field]) for field in COST_FIELDS)
        lists = (forward, input_, weight)
        extra = {key: tuple(map(float, document[key])) for key in ("comm_forward", "comm_backward") if key in document}
        send = float(document.get("send", 0.0))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} does not hold costs ({type(error).__name__}: {error}). It is a JSON object with lists forward, input and "
            f"weight of {stages} numbers each, and optionally send, comm_forward and comm_backward."
        ) from None
    wrong = next((len(values) for values in (*lists, *extra.values()) if len(values) != stages), None)
    if wrong is not None or min(map(min, lists)) < 0:
        raise ConfigError(
            f"{path} has lists of {wrong} numbers or negative ones, but the schedule has {stages} virtual stages: give "
            f"{stages} times, none negative, in each list."
        )
    return Costs(forward, input_, weight, send, **extra)


def _adapted(
    ranks: int,
    microbatches: int,
    virtual_stages: int,
    costs: Costs | None,
    times: tuple[float, float, float, float],
    memory_limit: float | None,
) -> tuple[Schedule, Costs]:
    from sennit.pipeline.search import adaptive
    from sennit.pipeline.simulate import Costs

    if ranks < 1 or microbatches < 1:
        raise ConfigError(f"{ranks} ranks and {microbatches} microbatches: both must be at least 1.")
    if costs is None:
        n = 2 * ranks
        forward, input_, weight, send = times
        costs = Costs((forward / 2,) * n, (input_ / 2,) * n, (weight / 2,) * n, send)
    options = {} if virtual_stages in (0, 2) else {"placement": "loop", "virtual_stages": virtual_stages}
    return adaptive(ranks, microbatches, costs, memory_limit=memory_limit, **options), costs


def _formula(
    name: str, made: Schedule, virtual_stages: int, forward: float, input_: float, weight: float, pairs: bool
) -> dict[str, Any] | None:
    from sennit.pipeline.formulas import expected
    from sennit.recipe.schedules import default_virtual_stages

    if name in ("v-half", "v-min"):
        return None
    v = default_virtual_stages(name, virtual_stages)
    found = expected(
        name, made.num_ranks, made.num_microbatches, v, forward=forward, input=input_, weight=weight, fused=pairs
    )
    return None if found is None else {"excess": found.excess, "peak": found.peak_activations, "parameters": found.parameters}


def _write(
    made: Schedule, timeline: Any, csv: Path | None, png: Path | None, html: Path | None, trace: Path | None
) -> None:
    try:
        if csv is not None:
            from sennit.pipeline.text import to_csv

            csv.write_text(to_csv(made), encoding="utf-8")
        if png is not None or html is not None:
            from sennit.pipeline.draw import draw_html, draw_png

            if png is not None:
                draw_png(png, made, {"simulated": timeline})
            if html is not None:
                draw_html(html, made, {"simulated": timeline})
        if trace is not None:
            from sennit.pipeline.trace import save_trace

            save_trace(trace, {made.name: timeline}, microseconds=1000.0)
    except OSError as error:
        raise ConfigError(f"{error.filename or 'A file'} cannot be written: {error.strerror}. Choose another path.") from None


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console, formula = Console(), document["formula"]
    table = Table(title=f"{document['name']}, {document['ranks']} ranks, {document['microbatches']} microbatches: verified")
    table.add_column("")
    table.add_column("simulated", justify="right")
    table.add_column("formula", justify="right")
    excess = document["makespan"] - document["ideal"]
    known = None if formula is None else formula["excess"]
    table.add_row("makespan", f"{document['makespan']:g}", "" if known is None else f"{document['ideal'] + known:g}")
    table.add_row("ideal (no waiting)", f"{document['ideal']:g}", "")
    table.add_row("excess", f"{excess:g}", "" if known is None else f"{known:g}")
    table.add_row("bubble", f"{100 * document['bubble']:.1f} %", "")
    peak = max(document["peak_activations"])
    table.add_row("activations, most (L/p x mb)", f"{peak:g}", f"{formula['peak']:g}" if formula else "")
    table.add_row("activations by rank", " ".join(f"{x:g}" for x in document["peak_activations"]), "")
    table.add_row("parameters of a rank (L/p)", f"{max(document['parameters']):g}", "")
    table.add_row("receives posted ahead", str(document["window"]), "")
    console.print(table)


__all__ = ["schedule"]
