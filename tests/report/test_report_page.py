"""The report: complete, self-contained, safe with hostile text, and drawn by a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from sennit.errors import DataError
from sennit.report import build_report
from sennit.report.page import script_json

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PLOTS = ("loss", "bits", "lr", "grad_norm", "tokens_per_second", "memory", "phases", "shares")
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Text, scripts and attributes of a page; checks that elements nest."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict, str]] = []
        self.text: list[str] = []
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids.add(attributes.get("id") or "")
        self.links += [value or "" for key, value in attrs if key in ("src", "href", "action", "data", "srcset")]
        if tag == "script":
            self.scripts.append((attributes, ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        else:
            self.text.append(data)

    @property
    def data(self) -> dict:
        return json.loads(next(text for attributes, text in self.scripts if attributes.get("id") == "report-data"))


def read(files) -> tuple[str, Page]:
    source = files.html.read_text(encoding="utf-8")
    return source, Page(source)


def test_page_and_picture_of_a_run(tmp_path, write_run):
    files = build_report(write_run(tmp_path / "a-run"))
    source, page = read(files)
    assert {f"plot-{key}" for key in PLOTS} <= page.ids
    traces = {panel["key"]: [t["name"] for t in panel["traces"]] for panel in page.data["panels"]}
    assert traces["loss"] == ["train", "smoothed over 7", "held-out", "checkpoint"]
    assert "gzip -9, held-out" in traces["bits"] and traces["phases"][:4] == [
        "data",
        "forward",
        "backward",
        "optimizer",
    ]
    assert page.data["resumes"] == [150] and set(page.data["axes"]) == {"tokens", "minutes"}
    throughput = next(panel for panel in page.data["panels"] if panel["key"] == "tokens_per_second")
    assert throughput["rightAxis"] == "MFU, % of 2.40 TFLOP/s (bf16)"
    text = " ".join(page.text)
    for figure in ("12.3 M", "2.46 M", "9,000", "33.7 %", "1.14 GiB", "gzip -9: 1.98", "finished: 300 steps"):
        assert figure in text
    assert "global_batch_size = 16" in text and "packages.numpy" in text and "<script>alert(1)</script> & more" in text
    assert files.png.read_bytes().startswith(b"\x89PNG") and len(source) < 6e6


def test_one_slow_step_does_not_flatten_the_others(tmp_path, write_run):
    _, page = read(build_report(write_run(tmp_path / "run")))
    phases = next(panel for panel in page.data["panels"] if panel["key"] == "phases")
    totals = [sum(values) for values in zip(*(trace["y"] for trace in phases["traces"]), strict=True)]
    assert max(totals[1:]) < phases["yMax"] < 0.5 * totals[0]  # the first step warms up


def test_the_picture_has_the_newest_sample(tmp_path, write_run):
    def height(run) -> int:
        return int.from_bytes(build_report(run).png.read_bytes()[20:24], "big")

    run = write_run(tmp_path / "run", steps=20)
    with_sample = height(run)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if '"sample"' not in line))
    assert height(run) < with_sample


def test_nothing_is_loaded_from_outside(tmp_path, write_run):
    source, page = read(build_report(write_run(tmp_path / "run")))
    assert page.links and all(link.startswith("data:") for link in page.links)
    outside_scripts = re.sub(r"<script.*?</script>", "", source, flags=re.DOTALL)
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", outside_scripts)
    assert not re.search(r"url\(|@import", outside_scripts)
    assert "default-src 'none'" in outside_scripts


def test_hostile_text_stays_text(tmp_path, write_run):
    run = write_run(tmp_path / "<img src=x onerror=alert(1)>", steps=20)
    evil = "</script><script>alert(1)</script><!-- ]]> \x00 \ud800 $x$"
    records = [
        {"kind": "sample", "step": 20, "prompt": evil, "text": evil * 2000},
        {"kind": "checkpoint", "step": 20, "seconds": "x", "bytes": None, "path": evil},
        {"kind": evil, "step": 20},
        {"kind": "step", "step": 21, "loss": 1.0, "step_seconds": 1.0, "seconds": {evil: 1.0}},
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    (run / "environment.json").write_text(json.dumps({"device": evil, evil: {evil: evil}}))
    (run / "recipe.toml").write_text(f"[run]\nname = {json.dumps(evil[:40])}\n# {evil[:30]}")
    source, page = read(build_report(run))
    assert len(page.scripts) == 4 and "alert(1)" not in "".join(text for _, text in page.scripts[1:])
    assert "alert(1)" in " ".join(page.text) and "\x00" not in source


def test_json_inside_a_script_cannot_end_it():
    text = script_json({"a": "</script><!--&"})
    assert not set("<>&") & set(text) and json.loads(text) == {"a": "</script><!--&"}


@pytest.mark.parametrize("content", ["recipe only", "no step", "torn first line", "one step", "only losses", "all NaN"])
def test_runs_with_little_in_them_get_a_report(tmp_path, content):
    run = tmp_path / "run"
    run.mkdir()
    lines = {
        "recipe only": None,
        "no step": "",
        "torn first line": '{"kind": "st',
        "one step": '{"kind": "step", "step": 1, "loss": 8.3, "mfu": 0.4, "tflops": 1.0, "tokens_per_second": 10.0}\n',
        "only losses": '{"kind": "step", "step": 1, "loss": 8.3}\n{"kind": "step", "step": 9, "loss": 8.1}\n',
        "all NaN": '{"kind": "step", "step": 1, "loss": NaN, "seconds": {"data": null}}\n',
    }[content]
    (run / "recipe.toml").write_text('[run]\nname = "run"\n[train]\nsteps = 10\n')
    if lines is not None:
        (run / "metrics.jsonl").write_text(lines)
    files = build_report(run)
    _, page = read(files)
    text = " ".join(page.text)
    assert ("No step has been recorded yet" in text) == (content not in ("one step", "only losses"))
    if content in ("one step", "only losses"):
        assert "in progress or stopped" in text and "of 10 steps" in text
    assert files.png.stat().st_size > 1000


def test_a_long_run_stays_small_and_keeps_its_spike(tmp_path, write_run):
    run = write_run(tmp_path / "run", steps=20_000)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    index = next(i for i, line in enumerate(lines) if '"step": 12345,' in line)
    lines[index] = json.dumps({**json.loads(lines[index]), "grad_norm": 777.0})
    (run / "metrics.jsonl").write_text("\n".join(lines))
    files = build_report(run)
    _, page = read(files)
    norm = next(panel for panel in page.data["panels"] if panel["key"] == "grad_norm")
    assert 777.0 in norm["traces"][0]["y"] and norm["log"]
    assert files.html.stat().st_size < 6e6
    assert max(len(t["x"]) for panel in page.data["panels"] for t in panel["traces"]) <= 1500


def test_where_the_files_go(tmp_path, write_run):
    run = write_run(tmp_path / "run", steps=20)
    files = build_report(run, tmp_path / "new" / "page.html")
    assert files.html == tmp_path / "new" / "page.html" and files.png == tmp_path / "new" / "page.png"
    assert build_report(run, tmp_path / "folder").html == tmp_path / "folder" / "report.html"
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        build_report(run, tmp_path / "file" / "page.html")
    assert not list(tmp_path.rglob("*.tmp"))


def test_command_prints_one_json_document(tmp_path, write_run):
    import typer
    from typer.testing import CliRunner

    from sennit.cli.report import report as command

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(write_run(tmp_path / "run", steps=20)), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["html"].endswith("report.html") and document["png"].endswith("report.png")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1400, 500])
def test_a_browser_draws_every_picture_without_an_error(tmp_path, write_run, width):
    files = build_report(write_run(tmp_path / "run", steps=60))
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --virtual-time-budget=10000 --enable-logging=stderr"
    done = subprocess.run(
        [str(CHROMIUM), *flags.split(), f"--window-size={width},2400", f"--user-data-dir={tmp_path / 'profile'}"]
        + ["--dump-dom", f"file://{files.html}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    for key in PLOTS:
        plot = done.stdout.split(f'id="plot-{key}"')[1].split("<section")[0]
        assert "main-svg" in plot and re.search(r'class="(js-line|js-fill|point)|<g class="points"', plot), key
