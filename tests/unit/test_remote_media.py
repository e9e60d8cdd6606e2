"""A dataset on a web server trains as the same files on disk do: tokens and pixels are equal."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from dflop import ProfileError
from dflop._native import Dataset, run_cli
from dflop.data.loader import SampleLoader
from dflop.models import load_adapter

NUM_SAMPLES = 12


def dflop(*arguments):
    status, request = run_cli(["dflop", *map(str, arguments)])
    assert (status, request) == (0, None), arguments


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote") / "demo"
    dflop("demo-data", folder, "--samples", NUM_SAMPLES, "--seed", 0)
    return folder


@pytest.fixture
def server(demo):
    """The URL of `demo/data`, with ranges, and the paths that were asked for."""
    asked = []

    class Files(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            asked.append((self.path, self.headers.get("Range")))
            path = demo / "data" / self.path.lstrip("/")
            if not path.is_file():
                self.send_error(404)
                return
            data = path.read_bytes()
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            first, end = (int(found[1]), min(int(found[2]) + 1, len(data))) if found else (0, len(data))
            self.send_response(206 if found else 200)
            if found:
                self.send_header("Content-Range", f"bytes {first}-{end - 1}/{len(data)}")
            self.send_header("Content-Length", str(end - first))
            self.send_header("ETag", f'"{len(data)}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data[first:end])

        do_HEAD = do_GET

        def log_message(self, *_):
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as serving:
        serving.daemon_threads = True
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}", asked
        serving.shutdown()


def profiled(demo, name, mixture, media_root):
    """The configuration whose data are elsewhere, and its profile."""
    text = (demo / "dflop.yaml").read_text()
    text = text.replace("mixture: data/mixture.yaml", f"mixture: {mixture}\n  media_root: {media_root}")
    config, out = demo / f"{name}.yaml", demo / f"{name}_profile.json"
    config.write_text(text)
    dflop("profile", "data", "-c", config, "-o", out)
    return config, out


def test_pixels_of_a_remote_dataset_are_those_of_the_local_one(demo, server, monkeypatch, capfd):
    url, asked = server
    monkeypatch.setenv("DFLOP_STORE_ALLOW_HTTP", "true")
    local = profiled(demo, "local", "data/images.jsonl", "data/media")
    assert asked == []
    assert "remote stores" not in capfd.readouterr().err
    remote = profiled(demo, "remote", f"{url}/images.jsonl", f"{url}/media")
    assert f"\n{len(asked)} requests to remote stores, " in "\n" + capfd.readouterr().err
    local, remote = (Dataset(str(config), str(out)) for config, out in (local, remote))
    headers = [found for path, found in asked if path.startswith("/media/")]
    assert headers
    assert all(found == "bytes=0-65535" for found in headers)

    adapter = load_adapter(demo / "model")
    loaders = SampleLoader(local, adapter), SampleLoader(remote, adapter)
    assert len(local) == len(remote) > 0
    num_media = 0
    for index in range(len(local)):
        here, there = (loader.sample(index) for loader in loaders)
        assert here.id == there.id
        assert torch.equal(here.input_ids_T, there.input_ids_T)
        assert all(medium.is_local and medium.held_bytes == 0 for medium in here.files)
        assert not any(medium.is_local for medium in there.files)
        assert torch.equal(*(loader.tiles(index) for loader in loaders))
        for mine, theirs in zip(here.files, there.files, strict=True):
            assert mine.read() == theirs.read()
            num_media += 1
    assert num_media == len(headers)

    # Gone between two looks: the medium is named.
    index = next(i for i in range(len(remote)) if loaders[1].sample(i).files)
    medium = loaders[1].sample(index).files[0]
    name = medium.path.rsplit("/", 1)[1]
    (demo / "data/media" / name).rename(demo / "data" / name)
    with pytest.raises(ProfileError, match=rf"cannot read `{re.escape(url)}/media/{name}`: 404"):
        medium.read()
    for loader in loaders:
        loader.close()
