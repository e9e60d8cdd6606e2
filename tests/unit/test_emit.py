"""`dflop plan --emit`: what it prints, run by a shell, is read by torchrun's own parser as it was meant."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
import yaml
from torch.distributed.run import config_from_args, get_args_parser

import warm

CONFIG = """\
model: {name: llava-onevision-qwen2-7b}
data: {mixture: data/mixture.yaml, video_max_frames: 4}
cluster: {device: h100, num_ranks: 16, ranks_per_node: 8}
train: {global_batch_size: 16}
"""
NAME = "it's one.yaml"
# `torchrun` says what it was called with; `srun` runs its command, as on one node of several.
PROGRAMS = {
    "torchrun": f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n",
    "srun": '#!/bin/bash\nexec "$@"\n',
    "scontrol": "#!/bin/bash\nprintf 'node7\\nnode8\\n'\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emit")
    done = warm.run(["-m", "dflop", "demo-data", ".", "--samples", "16"], cwd=folder, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    (folder / NAME).write_text(CONFIG)
    (folder / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return folder


def emitted(launcher, folder, config=NAME):
    flags = ["--config", config, "--only", "colocated=true,zero=3", "--emit", launcher]
    done = warm.run(["-m", "dflop", "plan", *flags], cwd=folder, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(text, folder, **variables):
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    script = ["bash", "-c", text]
    return subprocess.run(
        script, env={"PATH": path, **variables}, capture_output=True, text=True, check=False
    )


def parsed(text, folder, **variables):
    """Torchrun's configuration, and the command that it is to start."""
    done = run(text, folder, **variables)
    assert done.returncode == 0, done.stderr
    config, command, arguments = config_from_args(get_args_parser().parse_args(json.loads(done.stdout)))
    return config, [command, *arguments]


def check(config, command, address, is_host, rdzv_id, head):
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 8)
    assert config.local_addr == address
    assert config.rdzv_configs["is_host"] == is_host
    assert (config.rdzv_backend, config.run_id, config.rdzv_endpoint) == ("c10d", rdzv_id, f"{head}:29400")
    assert command == ["dflop", "train", "--config", NAME]


def test_the_command_of_a_node_says_its_address_and_whether_it_is_the_first(folder):
    """The same text on all nodes; one that is not told its address is refused by the shell."""
    text = emitted("torchrun", folder)
    for here, is_host in (("10.0.0.7", "1"), ("10.0.0.8", "0")):
        check(*parsed(text, folder, HEAD="10.0.0.7", HERE=here), here, is_host, "dflop", "10.0.0.7")
    for missing in ({"HEAD": "10.0.0.7"}, {"HERE": "10.0.0.7"}):
        done = run(text, folder, **missing)
        assert done.returncode != 0
        assert done.stdout == ""


def test_a_slurm_job_says_them_on_each_node(folder):
    text = emitted("slurm", folder)
    for number, (here, is_host) in enumerate((("node7", "1"), ("node8", "0"))):
        of_slurm = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "41"}
        node = {"SLURM_NODEID": str(number), "SLURMD_NODENAME": here}
        config, command = parsed(text, folder, **of_slurm, **node)
        check(config, command, here, is_host, "41", "node7")
        # Of `#SBATCH --signal=USR1@120`, and what torchrun handles by itself.
        assert config.signals_to_handle == "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    assert "#SBATCH --signal=USR1@120\n" in text


def manifest(text):
    """Service and Job of a manifest."""
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    return service, job


def test_a_manifest_starts_as_many_pods_as_nodes_which_meet_at_the_first(folder):
    service, job = manifest(emitted("kubernetes", folder))
    assert (job["apiVersion"], service["apiVersion"]) == ("batch/v1", "v1")
    name, spec = job["metadata"]["name"], job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (2, 2, 0)
    # Pods find each other by names, also before they are ready: the Service has no address, and is theirs.
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}
    pod = spec["template"]["spec"]
    assert (pod["subdomain"], pod["restartPolicy"]) == (service["metadata"]["name"], "Never")
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    mounted = [mount["name"] for mount in container["volumeMounts"]]
    assert mounted == [volume["name"] for volume in pod["volumes"]]
    config, command = parsed(shlex.join(container["command"]), folder)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 8)
    assert (config.rdzv_backend, config.run_id) == ("c10d", name)
    assert config.rdzv_endpoint == f"{name}-0.{service['metadata']['name']}:29400"
    assert command == ["dflop", "train", "--config", NAME]


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "kubernetes"])
def test_the_node_that_is_not_full_is_the_last(launcher, folder):
    """12 ranks on nodes of 8: each agent is told its number, and the second starts four ranks."""
    (folder / "uneven.yaml").write_text(CONFIG.replace("num_ranks: 16", "num_ranks: 12"))
    text = emitted(launcher, folder, "uneven.yaml")
    if launcher == "kubernetes":
        text = shlex.join(manifest(text)[1]["spec"]["template"]["spec"]["containers"][0]["command"])
    for number, ranks in enumerate((8, 4)):
        variables = {
            "torchrun": {"NODE": str(number), "HEAD": "node7"},
            "slurm": {"SLURM_NODEID": str(number), "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "41"},
            "kubernetes": {"JOB_COMPLETION_INDEX": str(number)},
        }[launcher]
        config, command = parsed(text, folder, **variables)
        assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, ranks)
        assert config.rdzv_backend == "static"
        assert config.rdzv_configs["rank"] == number
        head = "dflop-0.dflop" if launcher == "kubernetes" else "node7"
        assert config.rdzv_endpoint == f"{head}:29400"
        assert command == ["dflop", "train", "--config", "uneven.yaml"]
