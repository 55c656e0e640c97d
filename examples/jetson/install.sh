#!/bin/sh
# Install the agent on a Jetson with JetPack 6 as a service. Prints its commands; with --run, as root, it carries them out.
# Usage: install.sh [--run] BROKER DATA
set -eu

run=
[ "${1:-}" = --run ] && run=yes && shift
broker=${1:?name the broker, such as mqtts://broker.example} data=${2:?name the data: a folder with manifest.jsonl, or an .npz}
here=$(cd "$(dirname "$0")" && pwd)
constraints=$(cd "$here/../.." && pwd)/constraints/jetpack-6.txt
wheels=${WHEELS:-/srv/wheels}  # from `make wheels ARCH=aarch64 FOR=3.10` on a machine with internet

# As a shell takes it back, whatever the paths are.
quoted() {
    case $1 in
    *[!A-Za-z0-9_./:=@%+,-]* | '') printf "'%s' " "$(printf %s "$1" | sed "s/'/'\\\\''/g")" ;;
    *) printf '%s ' "$1" ;;
    esac
}

step() {
    printf "%s\n" "$(for word; do quoted "$word"; done)"
    [ -z "$run" ] || "$@"
}

step python3 -m venv /opt/edgefl
step /opt/edgefl/bin/pip install -c "$constraints" --no-deps --index-url https://pypi.jetson-ai-lab.io/jp6/cu126 torch
step /opt/edgefl/bin/pip install --find-links "$wheels" 'edgefl-toolkit[train]'
step /opt/edgefl/bin/edgefl-agent doctor --profile "$here/my-jetson.yaml" --broker "$broker" --data "$data"
step /opt/edgefl/bin/edgefl-agent install --profile "$here/my-jetson.yaml" --broker "$broker" --data "$data"
step /opt/edgefl/bin/edgefl-agent status
