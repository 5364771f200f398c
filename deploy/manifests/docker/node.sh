#!/usr/bin/env bash
# One Ray node in a container: `baton-node head` also brings the cluster up on it, `baton-node worker` lends its cores.
#
#   BATON_CONFIG      configuration that `baton up` reads (head)
#   BATON_NODES       Ray nodes that must have joined before `baton up` places workers (head; default 1)
#   BATON_API_KEYS    file with the hashes of API keys, such as a mounted secret; followed while the container runs (head)
#   BATON_HEAD        host:port of the head's Ray (worker; default head:6379)
#   RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN   the token of the Ray cluster
#
# KubeRay's own `ray start` command is taken where it gives one. SIGTERM takes the cluster down, then the node.
#
# RUN without a container on 2026-11-24, Debian 12, Ray 2.60: tests/cluster/test_node_script.py.
set -euo pipefail

role=${1:?"say which node: baton-node head, or baton-node worker"}
state=${HOME:?}/.local/state/baton/baton
patience=600 # seconds for the other nodes to join

if [[ ${RAY_AUTH_MODE:-} != token ]]; then
    echo "baton-node: RAY_AUTH_MODE is not token, and a Ray without one runs any caller's code; set it and a token" >&2
    exit 1
fi
ulimit -n "$(ulimit -Hn)"

# A mounted secret belongs to another user or group. Baton wants a file that its own user alone can read.
take_keys() {
    [[ -n ${BATON_API_KEYS:-} ]] || return 0
    (umask 077 && mkdir -p "$state")
    if ! cmp -s "$BATON_API_KEYS" "$state/api-keys.json"; then
        install -m 600 "$BATON_API_KEYS" "$state/api-keys.json.new"
        mv "$state/api-keys.json.new" "$state/api-keys.json"
    fi
}

follow_keys() {
    # A pipe in which nothing ever comes: a pause of the shell's own, with no process that would be left over.
    while ! read -rt 5 <> <(:); do take_keys; done
}

nodes() {
    python - <<'PYTHON'
import sys

from deploy.control_plane import probe

address, token = probe.find(), probe.token()
if address is None or probe.ask_ray(address, token and token.text) is not probe.RayAnswer.WELCOME:
    print(0)
    sys.exit()
import ray

ray.init(address, log_to_driver=False, logging_level="critical")
print(sum(node["Alive"] for node in ray.nodes()))
PYTHON
}

stop() {
    trap - TERM INT
    if [[ $role == head ]]; then baton down || true; fi
    kill -TERM "$ray" 2>/dev/null || true
    wait "$ray" || true
    exit 0
}

common="--block --disable-usage-stats --object-store-memory=100000000" # Baton's pages never pass through Ray
case $role in
head) start="ray start --head --port=6379 --include-dashboard=false $common" ;;
worker) start="ray start --address=${BATON_HEAD:-head:6379} $common" ;;
*)
    echo "baton-node: $role is neither head nor worker" >&2
    exit 2
    ;;
esac
bash -c "exec ${KUBERAY_GEN_RAY_START_CMD:-$start}" &
ray=$!
trap stop TERM INT
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

if [[ $role == head ]]; then
    take_keys
    follow_keys &
    deadline=$((SECONDS + patience))
    until (($(nodes) >= ${BATON_NODES:-1})); do
        kill -0 "$ray" # with -e: a Ray that has ended ends the container
        if ((SECONDS > deadline)); then
            echo "baton-node: fewer than ${BATON_NODES:-1} nodes have joined in $patience s" >&2
            exit 1
        fi
        sleep 1
    done
    baton up --ray join --config "${BATON_CONFIG:?}"
fi
wait "$ray"
