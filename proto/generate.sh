#!/bin/sh
# Generates the Python stubs of the public contract: sh proto/generate.sh [OUTPUT]
# Needs grpcio-tools 1.81.1 (the dev extra): stubs of a later one refuse the protobuf that Ray allows.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
output=${1:-$root}
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=python3
cd "$root/proto"
"$python" -m grpc_tools.protoc -I . --python_out="$output" --pyi_out="$output" --grpc_python_out="$output" \
    baton/v1/generation.proto
