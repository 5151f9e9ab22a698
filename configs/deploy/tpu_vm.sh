#!/usr/bin/env bash
# A TPU VM or slice with jaxmm on every host of it, by gcloud.
#
#   configs/deploy/tpu_vm.sh create NAME ZONE ACCELERATOR_TYPE [gcloud flag ...]
#   configs/deploy/tpu_vm.sh install NAME ZONE
#   configs/deploy/tpu_vm.sh start NAME ZONE MODEL [jaxmm serve flag ...]
#   configs/deploy/tpu_vm.sh tunnel|logs|stop|delete NAME ZONE
#
# ACCELERATOR_TYPE as Cloud TPU calls it: v5litepod-8, v6e-16, v5p-32. MODEL: a path that every
# host has, or a gs:// address of a converted checkpoint. Runs from a clone of the repository.
set -euo pipefail

usage() {
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
}

# Runs a command on hosts of the slice: on_hosts WORKERS COMMAND
on_hosts() {
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker="$1" --command="$2"
}

# The software of the TPU VM that a generation needs.
runtime_version() {
  case "$1" in
    v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *)
      echo "no runtime version known for $1; is it v5litepod-8, v6e-16, v5p-32 ...?" >&2
      exit 2
      ;;
  esac
}

# Queued: capacity that is not there at once is waited for, and nothing is paid meanwhile.
create() {
  local accelerator=$1 runtime state
  shift
  runtime=$(runtime_version "$accelerator")
  gcloud compute tpus queued-resources create "$name" --zone="$zone" --node-id="$name" \
    --accelerator-type="$accelerator" --runtime-version="$runtime" "$@"
  echo "waiting for $accelerator; Ctrl-C leaves the request in the queue" >&2
  while :; do
    state=$(gcloud compute tpus queued-resources describe "$name" --zone="$zone" \
      --format='value(state.state)')
    case "$state" in
      ACTIVE) return ;;
      FAILED | SUSPENDED)
        echo "the request ended as $state: gcloud compute tpus queued-resources describe $name" >&2
        exit 1
        ;;
    esac
    sleep "${JAXMM_POLL_SECONDS:-20}"
  done
}

# The wheel of this clone, with JAX for TPU, in an environment of its own on every host.
install_jaxmm() {
  local wheels wheel
  wheels=$(mktemp -d)
  trap 'rm -rf "$wheels"' EXIT
  python3 -m pip wheel --quiet --no-deps --wheel-dir "$wheels" "$(dirname "$0")/../.."
  wheel=$(basename "$wheels"/jaxmm-*.whl)
  gcloud compute tpus tpu-vm scp "$wheels/$wheel" "$name": --zone="$zone" --worker=all
  on_hosts all "set -e
    python3 -m pip install --quiet --user --upgrade uv
    ~/.local/bin/uv venv --quiet --allow-existing --python 3.12 ~/jaxmm
    ~/.local/bin/uv pip install --quiet --python ~/jaxmm --reinstall-package jaxmm \"\$HOME/${wheel}[tpu,gcs]\""
}

# A unit on every host: the first serves HTTP, the others follow it. One that ends takes the others
# along, and systemd starts them all again.
start() {
  local model=$1 words
  shift
  words=$(printf ' %q' serve --model "$model" --host 0.0.0.0 --tensor-parallel 0 "$@")
  on_hosts all "sudo systemctl reset-failed jaxmm 2>/dev/null
    sudo systemd-run --unit=jaxmm --uid=\$(id -u) --gid=\$(id -g) --setenv=HOME=\$HOME \
      --property=Restart=always --property=RestartSec=5 --property=TimeoutStopSec=150 \
      ~/jaxmm/bin/jaxmm$words"
  echo "starting; the first start compiles for minutes. Watch: $0 logs $name $zone" >&2
}

[[ $# -ge 3 ]] || usage
action=$1 name=$2 zone=$3
shift 3
case "$action" in
  create)
    [[ $# -ge 1 ]] || usage
    create "$@"
    ;;
  install) install_jaxmm ;;
  start)
    [[ $# -ge 1 ]] || usage
    start "$@"
    ;;
  tunnel)
    echo "http://127.0.0.1:8000 is the server until Ctrl-C" >&2
    gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=0 -- -N -L 8000:127.0.0.1:8000
    ;;
  logs) on_hosts 0 "sudo journalctl --unit=jaxmm --follow --lines=100 --output=cat" ;;
  stop) on_hosts all "sudo systemctl stop jaxmm" ;;
  delete) gcloud compute tpus queued-resources delete "$name" --zone="$zone" --force ;;
  *) usage ;;
esac
