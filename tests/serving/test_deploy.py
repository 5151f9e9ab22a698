"""Manifests, scripts and the container file: right by the published schemas, linters and facts."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from jaxmm.errors import ConfigError
from serving.app import create_app
from serving.cli import main
from serving.config import ServerConfig
from serving.deploy.render import (
    DRAIN_SECONDS,
    PRE_STOP_SECONDS,
    SCALE_METRIC,
    Deployment,
    render,
)
from serving.deploy.topology import GENERATIONS, parse_topology
from tests.fakes import FakeEngine

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "configs" / "deploy"
SCHEMAS = ROOT / "tests" / "data" / "schemas"
MANIFESTS = sorted((DEPLOY / "gke").glob("*.yaml"))
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
KUBERNETES = "1.34"
TOPOLOGIES = ("v5e:1x1", "v6e:2x4", "v5p:2x2x1", "v5e:4x8", "v5p:2x2x4", "tpu7x:4x4x8")


def rendered(topology, **given):
    """Resources of a manifest by kind."""
    values = {"model": "/models/m", "bucket": "weights", "max_replicas": 3, **given}
    text = render(Deployment(topology=parse_topology(topology), **values))
    return {resource["kind"]: resource for resource in yaml.safe_load_all(text) if resource}


def pods(resources):
    """Pod templates of a manifest: the first is the one that answers HTTP."""
    if "Deployment" in resources:
        return [resources["Deployment"]["spec"]["template"]]
    template = resources["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [template["leaderTemplate"], template["workerTemplate"]]


def check(resource):
    """Compare a resource with its published schema; unknown fields are errors."""
    own = SCHEMAS / f"{resource['kind'].lower()}.json"
    if not own.exists():
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
        return
    definitions = schema_contents(
        f"kubernetes-json-schema/v{KUBERNETES}.0-local-strict/_definitions.json", KUBERNETES
    )
    registry = Resource.from_contents(definitions) @ Registry()
    schema = strict(json.loads(own.read_text(encoding="utf-8")), definitions["$id"])
    jsonschema.Draft202012Validator(schema, registry=registry).validate(resource)


def strict(schema, kubernetes):
    """Refuse fields that a schema does not name, and resolve its references."""
    if isinstance(schema, list):
        return [strict(part, kubernetes) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: strict(value, kubernetes) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        schema.setdefault("additionalProperties", False)
    if str(schema.get("$ref", "")).startswith("kubernetes:"):
        name = schema["$ref"].removeprefix("kubernetes:")
        return {"$ref": f"{kubernetes}#/$defs/{name}"}
    return schema


def run(*words):
    """Run the command line; give exit status, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "machine", "accelerator_type", "label"),
    [  # from the tables of the Cloud TPU and GKE documentation
        ("v5e:1x1", 1, 1, "ct5lp-hightpu-1t", "v5litepod-1", "tpu-v5-lite-podslice"),
        ("v5e:2x2", 4, 1, "ct5lp-hightpu-4t", "v5litepod-4", "tpu-v5-lite-podslice"),
        ("v5e:2x4", 8, 1, "ct5lp-hightpu-8t", "v5litepod-8", "tpu-v5-lite-podslice"),
        ("v5e:4x8", 32, 8, "ct5lp-hightpu-4t", "v5litepod-32", "tpu-v5-lite-podslice"),
        ("v6e:2x4", 8, 1, "ct6e-standard-8t", "v6e-8", "tpu-v6e-slice"),
        ("v6e:16x16", 256, 64, "ct6e-standard-4t", "v6e-256", "tpu-v6e-slice"),
        ("v4:2x2x1", 4, 1, "ct4p-hightpu-4t", "v4-8", "tpu-v4-podslice"),
        ("v5p:2x2x4", 16, 4, "ct5p-hightpu-4t", "v5p-32", "tpu-v5p-slice"),
        ("v5p:4x4x20", 320, 80, "ct5p-hightpu-4t", "v5p-640", "tpu-v5p-slice"),
        ("tpu7x:2x2x1", 4, 1, "tpu7x-standard-4t", "tpu7x-8", "tpu7x"),
    ],
)
def test_a_topology_knows_its_chips_hosts_and_names(
    name, chips, hosts, machine, accelerator_type, label
):
    topology = parse_topology(name)
    assert str(topology) == name
    assert (topology.num_chips, topology.num_hosts) == (chips, hosts)
    assert topology.num_chips == topology.num_hosts * topology.chips_per_host
    assert (topology.machine_type, topology.accelerator_type) == (machine, accelerator_type)
    assert topology.generation.gke_accelerator == label


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("v5e", "not of the form"),
        ("v5e:4X8", "not of the form"),
        ("v9:4x8", "there are v4, v5e, v5p, v6e, tpu7x"),
        ("v5e:4x16", "no slice; v5e has 1x1"),
        ("v5e:2x2x1", "no slice"),
        ("v5p:4x8", "no slice"),
        ("v5p:0x4x4", "no slice"),
        ("v5p:8x4x4", "ascending order"),
    ],
)
def test_what_is_no_slice_is_refused(name, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_topology(name)


@pytest.mark.parametrize("options", [{}, {"spot": True, "cache": "pod"}], ids=["usual", "spot"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_manifests_keep_to_the_published_schemas(topology, options):
    resources = rendered(topology, **options)
    workload = "LeaderWorkerSet" if parse_topology(topology).num_hosts > 1 else "Deployment"
    assert set(resources) == {"Service", workload, "PodMonitoring", "HorizontalPodAutoscaler"}
    for resource in resources.values():
        check(resource)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate")),
        ("LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "workerTemplate", "spec")),
        ("PodMonitoring", ("spec", "endpoints", 0)),
        ("HorizontalPodAutoscaler", ("spec",)),
    ],
)
def test_the_schemas_refuse_a_field_that_is_none(kind, path):
    resource = node = rendered("v5e:4x8")[kind]
    for key in path:
        node = node[key]
    node["replicaz"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replicaz"):
        check(resource)


def test_a_slice_of_several_hosts_is_one_group_whose_first_host_answers():
    resources = rendered("v5e:4x8", replicas=2)
    workload = resources["LeaderWorkerSet"]
    group = workload["spec"]["leaderWorkerTemplate"]
    assert (workload["spec"]["replicas"], group["size"]) == (2, 8)
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    index = "leaderworkerset.sigs.k8s.io/worker-index"
    assert resources["Service"]["spec"]["selector"] == {"app": "jaxmm", index: "0"}
    leader, worker = (pod["spec"]["containers"][0] for pod in pods(resources))
    assert leader["args"] == worker["args"]
    assert "readinessProbe" in leader and "readinessProbe" not in worker


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_pods_ask_for_all_chips_of_their_host_and_outlast_the_drain(topology):
    for pod in pods(rendered(topology)):
        container = pod["spec"]["containers"][0]
        chips = {"google.com/tpu": parse_topology(topology).chips_per_host}
        assert container["resources"] == {"requests": chips, "limits": chips}
        sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        assert sleep == PRE_STOP_SECONDS and grace > sleep + DRAIN_SECONDS


def test_the_servers_words_are_words_that_it_takes_and_the_probes_paths_that_it_has(tokenizer):
    (pod,) = pods(rendered("v6e:2x4", server=("--max-model-len", "8192")))
    container = pod["spec"]["containers"][0]
    seen = []

    def load(config):
        seen.append(config)
        raise ConfigError("seen")

    words = list(container["args"])
    words[words.index("--port") + 1] = "0"
    with contextlib.redirect_stderr(io.StringIO()):
        main(words, load)
    assert (seen[0].model, seen[0].max_model_len) == ("/models/m", 8192)
    app = create_app(FakeEngine(tokenizer), ServerConfig())
    routes = {getattr(route, "path", "") for route in app.routes}
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    assert {container[probe]["httpGet"]["path"] for probe in probes} <= routes


def test_the_autoscaler_looks_at_a_metric_that_the_server_has():
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert f"| `{SCALE_METRIC}` | gauge |" in metrics
    [metric] = rendered("v5e:4x8")["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == f"prometheus.googleapis.com|{SCALE_METRIC}|gauge"


def test_a_replica_reads_its_bucket_as_an_account_of_its_own():
    (pod,) = pods(rendered("v6e:2x4", name="cats"))
    assert pod["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    assert pod["spec"]["serviceAccountName"] == "cats"
    (bare,) = pods(rendered("v6e:2x4", model="/opt/model", bucket=""))
    assert "annotations" not in bare["metadata"] and "serviceAccountName" not in bare["spec"]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"name": "Cats"}, "no Kubernetes name"),
        ({"name": 'x"\nkind: Pod'}, "no Kubernetes name"),
        ({"bucket": "gs://weights"}, "leave out gs://"),
        ({"model": ""}, "no model"),
        ({"bucket": ""}, "where --bucket is mounted"),
        ({"cache": "ram"}, "node or pod"),
        ({"replicas": 0}, "replicas=0"),
        ({"replicas": 4, "max_replicas": 2}, "max_replicas=2"),
        ({"scale_at": 0}, "scale_at=0"),
    ],
)
def test_what_would_give_no_working_manifest_is_refused(given, problem):
    with pytest.raises(ConfigError, match=problem):
        rendered("v5e:2x4", **given)


def test_text_that_yaml_would_read_otherwise_arrives_as_it_was_given():
    (pod,) = pods(rendered("v5e:2x4", image="a:b # c", server=("--model-name", 'no: "{"')))
    container = pod["spec"]["containers"][0]
    assert container["image"] == "a:b # c"
    assert container["args"][-2:] == ["--model-name", 'no: "{"']


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_each_manifest_beside_the_template_is_what_its_command_renders(path):
    text = path.read_text(encoding="utf-8")
    command = re.search(r"^# Written by: jaxmm (.*)$", text, re.MULTILINE)[1]
    status, out, _ = run(*shlex.split(command))
    assert (status, out) == (0, text), f"run: jaxmm {command} > {path.relative_to(ROOT)}"


def test_manifests_beside_the_template_have_slices_of_one_host_and_of_several():
    assert {"v5e-2x4", "v5e-4x8"} <= {path.stem for path in MANIFESTS}


def test_a_wrong_topology_ends_the_command_with_its_message():
    status, out, err = run("deploy", "render", "--topology", "v5e:3x3", "--model", "/m")
    assert (status, out) == (1, "") and err.startswith("jaxmm: topology 'v5e:3x3' is no slice")


def lint(tool, *words):
    found = subprocess.run(
        [Path(sys.executable).parent / tool, *words], capture_output=True, text=True, cwd=ROOT
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_scripts_pass_shellcheck():
    lint("shellcheck", *sorted(DEPLOY.rglob("*.sh")))


def test_the_container_file_passes_hadolint_and_copies_what_there_is():
    lint("hadolint", DEPLOY / "Containerfile")
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    copied = [
        w for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for w in line.split()
    ]
    assert copied and all((ROOT / name).exists() for name in copied)


def test_models_of_the_manifests_can_be_split_over_their_slices():
    """A slice of several hosts with chips left over is refused at start."""
    query_heads = {"Qwen2.5-VL-32B-Instruct": 40, "Qwen2.5-VL-72B-Instruct": 64}
    for path in (DEPLOY / "gke").glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        topology, model = re.search(r"--topology (\S+) --model /models/(\S+)", text).groups()
        assert query_heads[model] % parse_topology(topology).num_chips == 0, path.name


def test_what_is_installed_reads_models_at_gs_addresses():
    for name in ("Containerfile", "tpu_vm.sh"):
        assert "[tpu,gcs]" in (DEPLOY / name).read_text(encoding="utf-8")


@pytest.fixture
def gcloud(tmp_path):
    """Runs the script with a gcloud that writes down how it was called."""
    calls = tmp_path / "calls"
    program = tmp_path / "gcloud"
    program.write_text(
        f'#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done >>{calls}\n'
        f'printf "\\n" >>{calls}\n'
        'case "$*" in *describe*) echo "$FAKE_STATE" ;; esac\n'
    )
    program.chmod(0o755)

    def run_script(*words, state="ACTIVE"):
        calls.write_text("")
        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "FAKE_STATE": state,
            "JAXMM_POLL_SECONDS": "0",
        }
        done = subprocess.run(
            [DEPLOY / "tpu_vm.sh", *words], env=environment, capture_output=True, text=True
        )
        lines = calls.read_text(encoding="utf-8").split("\0\n")[:-1]
        return done, [line.split("\0") for line in lines]

    return run_script


def test_the_script_waits_for_a_slice_of_the_right_software(gcloud):
    done, (create, describe) = gcloud("create", "pod", "zone-a", "v6e-16", "--spot")
    assert done.returncode == 0
    assert create[:5] == ["compute", "tpus", "queued-resources", "create", "pod"]
    wanted = {"--zone=zone-a", "--accelerator-type=v6e-16", "--runtime-version=v2-alpha-tpuv6e"}
    assert wanted | {"--spot"} <= set(create)
    assert describe[3:5] == ["describe", "pod"]


@pytest.mark.parametrize(
    ("words", "state", "problem"),
    [
        (["create", "pod", "zone-a", "v6e-16"], "FAILED", "ended as FAILED"),
        (["create", "pod", "zone-a", "h100-8"], "ACTIVE", "no runtime version known for h100-8"),
        (["create", "pod", "zone-a"], "ACTIVE", "ACCELERATOR_TYPE as Cloud TPU calls it"),
        (["dance", "pod", "zone-a"], "ACTIVE", "ACCELERATOR_TYPE as Cloud TPU calls it"),
    ],
)
def test_the_script_says_what_went_wrong(gcloud, words, state, problem):
    done, _ = gcloud(*words, state=state)
    assert done.returncode != 0 and problem in done.stderr


@pytest.mark.parametrize("generation", [g for g in GENERATIONS if g != "tpu7x"])
def test_the_script_knows_every_generation_that_cloud_tpu_makes_vms_of(gcloud, generation):
    done, _ = gcloud("create", "pod", "z", f"{GENERATIONS[generation].slice_prefix}-8")
    assert done.returncode == 0


def test_the_script_starts_one_server_on_every_host_with_words_that_it_takes(gcloud):
    done, (ssh,) = gcloud("start", "pod", "z", "/data/my model", "--max-model-len", "8192")
    assert done.returncode == 0 and "--worker=all" in ssh
    command = next(word for word in ssh if word.startswith("--command="))
    words = shlex.split(command.split("~/jaxmm/bin/jaxmm", 1)[1])
    assert words[:5] == ["serve", "--model", "/data/my model", "--host", "0.0.0.0"]
    assert words[5:] == ["--tensor-parallel", "0", "--max-model-len", "8192"]


def test_commands_of_the_page_render_and_files_that_it_names_exist():
    lines = PAGE.replace("\\\n", " ")
    commands = re.findall(r"^jaxmm (deploy render [^|\n]*)", lines, re.MULTILINE)
    assert commands
    for command in commands:
        status, _, err = run(*shlex.split(command))
        assert status == 0, err
    named = re.findall(r"`((?:configs|docs|serving)/[\w./]+)`", PAGE)
    assert named and all((ROOT / name).exists() for name in named)
