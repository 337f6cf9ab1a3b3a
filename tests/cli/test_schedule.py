"""`sennit schedule` as a user calls it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.program import sennit


def document(*args: str) -> dict:
    done = sennit("schedule", *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "bubble"),
    [("1f1b", 30.4), ("interleaved", 17.9), ("zb-h1", 12.7), ("zb-v", 6.8), ("dualpipe", 5.9), ("dualpipev", 6.8)],
)
def test_figures_of_eight_ranks_and_sixteen_microbatches(name: str, bubble: float) -> None:
    found = document(name, "--ranks", "8", "--microbatches", "16")
    assert found["verified"] is True and found["ideal"] == 48.0
    assert found["bubble"] == pytest.approx(1 - 48 / found["makespan"])
    assert 100 * found["bubble"] <= bubble + 0.05
    assert found["makespan"] - found["ideal"] == pytest.approx(found["formula"]["excess"])
    assert max(found["peak_activations"]) == pytest.approx(found["formula"]["peak"])


def test_pairs_without_overlap_cost_twice_the_excess() -> None:
    apart = document("dualpipe", "--ranks", "8", "--microbatches", "16")
    together = document("dualpipe", "--ranks", "8", "--microbatches", "16", "--pairs")
    assert (apart["makespan"], together["makespan"]) == (51.0, 54.0)
    hidden = document("dualpipe", "--ranks", "8", "--microbatches", "32", "--pairs", "--hidden", "0.3")
    assert hidden["makespan"] / 96 == pytest.approx(0.819, abs=0.001)


@pytest.mark.parametrize("name", ["gpipe", "zb-h2", "v-half", "v-min", "adaptive"])
def test_every_name_is_known(name: str) -> None:
    assert document(name, "--ranks", "4", "--microbatches", "8")["verified"]


def test_files(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"timeline.{kind}" for kind in ("png", "html", "trace", "csv")}
    options = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    first = document("dualpipev", "--ranks", "2", "--microbatches", "4", "--pairs", *options)
    assert files["png"].read_bytes().startswith(b"\x89PNG") and "<html" in files["html"].read_text()[:500]
    events = json.loads(files["trace"].read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1}
    again = document("mine", "--ranks", "2", "--microbatches", "4", "--from-csv", str(files["csv"]))
    assert again["digest"] == first["digest"]


def test_costs_of_each_stage(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"forward": [1, 1], "input": [1, 1], "weight": [1, 3], "send": 0.5}))
    found = document("1f1b", "--ranks", "2", "--microbatches", "4", "--costs", str(costs))
    assert found["makespan"] > 4 * 5


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("zbv", "--ranks", "4", "--microbatches", "8"), ["zbv", "Did you mean zb-v"]),
        (("dualpipe", "--ranks", "3", "--microbatches", "8"), ["pp=3", "even", "pp=2 or 4"]),
        (("zb-v", "--ranks", "4", "--microbatches", "5"), ["5 microbatches", "at least 7", "use 7"]),
        (("1f1b", "--ranks", "0", "--microbatches", "5"), ["0 ranks", "at least 1"]),
        (("1f1b", "--ranks", "4", "--microbatches", "8", "--memory-limit", "2"), ["limit"]),
        (("1f1b", "--ranks", "2", "--microbatches", "4", "--costs", "/nowhere.json"), ["/nowhere.json", "2 numbers"]),
    ],
)
def test_bad_input_is_one_paragraph(args: tuple[str, ...], words: list[str]) -> None:
    done = sennit("schedule", *args)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    message = " ".join(done.stderr.split())
    for word in words:
        assert word in message, message


def test_needs_no_torch() -> None:
    import subprocess

    code = "import sys, sennit.cli.main as m; m.run(['schedule','1f1b','--ranks','4','--microbatches','8','--json']); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
