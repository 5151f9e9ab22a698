"""One manifest for GKE from one template: what a slice needs to serve a model. Host only."""

import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path

from jaxmm.errors import ConfigError
from serving.deploy.topology import Topology

_TEMPLATE = Path(__file__).parent / "gke.yaml.jinja"
_DNS_LABEL = r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?"
_BUCKET = r"[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]"
DRAIN_SECONDS = 120
"""Time that running answers have to end when their pod is asked to go."""
PRE_STOP_SECONDS = 15
"""Time in which load balancers stop sending, before the drain begins."""
_MARGIN_SECONDS = 15
_START_MINUTES = 30
SCALE_METRIC = "jaxmm_waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What a manifest is rendered from; each field but the first is a flag."""

    topology: Topology
    model: str
    """Directory in the container, below /models with a bucket; or a gs:// address."""
    image: str = "jaxmm:latest"
    """Container image, from configs/deploy/Containerfile."""
    name: str = "jaxmm"
    """Of everything that is created."""
    bucket: str = ""
    """Cloud Storage bucket, mounted at /models."""
    replicas: int = 1
    """Slices that serve; with an autoscaler the least."""
    max_replicas: int = 0
    """Slices that an autoscaler may use; 0: no autoscaler."""
    scale_at: int = 4
    """Waiting requests a slice at which the autoscaler adds one."""
    spot: bool = False
    """Slices that may be taken away."""
    cache: str = "node"
    """Where compiled steps are kept: the node's disk, or the pod's, as GKE Autopilot asks."""
    server: tuple[str, ...] = ()
    """More words for `jaxmm serve`."""

    def __post_init__(self) -> None:
        if not re.fullmatch(_DNS_LABEL, self.name):
            raise ConfigError(
                f"name {self.name!r} is no Kubernetes name: a letter, then letters, digits and "
                "dashes, 42 at most, all lower case"
            )
        if self.bucket and not re.fullmatch(_BUCKET, self.bucket):
            raise ConfigError(f"bucket {self.bucket!r} is no bucket's name; leave out gs://")
        if not self.model:
            raise ConfigError("no model named; give --model /models/NAME with --bucket")
        if self.model.startswith("/models") and not self.bucket:
            raise ConfigError(f"model {self.model!r} is below /models, where --bucket is mounted")
        if self.cache not in ("node", "pod"):
            raise ConfigError(f"cache {self.cache!r} is not node or pod")
        if self.replicas < 1:
            raise ConfigError(f"replicas={self.replicas} is below 1")
        if self.max_replicas and self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas={self.max_replicas} is below replicas={self.replicas}")
        if self.scale_at < 1:
            raise ConfigError(f"scale_at={self.scale_at} is below 1")


def render(deployment: Deployment) -> str:
    """YAML that `kubectl apply -f -` takes.

    A slice of one host is a Deployment, one of several a LeaderWorkerSet (whose controller must be
    in the cluster): its first host answers HTTP, and all of them start and end together.
    """
    from jinja2 import Environment, StrictUndefined

    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(
        _TEMPLATE.read_text(encoding="utf-8")
    )
    values = {f.name: getattr(deployment, f.name) for f in fields(deployment)}
    return template.render(
        **values,
        command=_command(deployment),
        arguments=_arguments(deployment),
        account=deployment.name if _reads_storage(deployment) else "",
        grace_seconds=PRE_STOP_SECONDS + DRAIN_SECONDS + _MARGIN_SECONDS,
        pre_stop_seconds=PRE_STOP_SECONDS,
        start_minutes=_START_MINUTES,
        scale_metric=f"prometheus.googleapis.com|{SCALE_METRIC}|gauge",
    )


def _reads_storage(deployment: Deployment) -> bool:
    return bool(deployment.bucket) or deployment.model.startswith("gs://")


def _arguments(deployment: Deployment) -> list[str]:
    return [
        "serve",
        "--model",
        deployment.model,
        "--host",
        "0.0.0.0",
        "--port",
        "8000",
        "--drain-seconds",
        str(DRAIN_SECONDS),
        "--tensor-parallel",
        "0",
        *deployment.server,
    ]


def _command(deployment: Deployment) -> str:
    """The flags that give this manifest again."""
    words = ["--topology", str(deployment.topology)]
    for f in fields(deployment):
        value = getattr(deployment, f.name)
        if f.name in ("topology", "server") or value == f.default:
            continue
        flag = "--" + f.name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    if deployment.server:
        words += ["--", *deployment.server]
    return " " + shlex.join(words)
