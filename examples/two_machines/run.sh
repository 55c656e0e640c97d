#!/bin/sh
# A server and two devices with TLS, enrolment and signed offers, as docs/security.md leads through it.
# Usage: run.sh [DIRECTORY [OPTION OF edgefl-coordinator run]...]
set -eu

work=${1:-two-machines}
[ $# -eq 0 ] || shift
mkdir -p "$work"
work=$(cd "$work" && pwd)
server=edgefl-server-$$ devices=edgefl-devices-$$
background=

# Each "machine" is a network namespace where this account may make them, else a set of processes on loopback.
if [ "$(id -u)" = 0 ] && ip netns add "$server" 2>/dev/null; then
    ip netns add "$devices"
    ip link add edgefl-s type veth peer name edgefl-d
    ip link set edgefl-s netns "$server"
    ip link set edgefl-d netns "$devices"
    ip -n "$server" address add 10.77.0.1/24 dev edgefl-s
    ip -n "$devices" address add 10.77.0.2/24 dev edgefl-d
    for end in "$server lo" "$server edgefl-s" "$devices lo" "$devices edgefl-d"; do
        ip -n "${end% *}" link set "${end#* }" up
    done
    host=10.77.0.1 port=8883 newcomers=8884
    on_server() { ip netns exec "$server" "$@"; }
    on_device() { ip netns exec "$devices" "$@"; }
    echo "two network namespaces: the server is $host, the devices are at 10.77.0.2"
else
    host=127.0.0.1 port=${PORT:-18883} newcomers=${ENROLL_PORT:-18884}
    on_server() { "$@"; }
    on_device() { "$@"; }
    echo "no right to make network namespaces: all on loopback"
fi

end() {
    trap - EXIT INT TERM
    for one in $background; do kill "$one" 2>/dev/null || true; done
    wait
    ip netns delete "$server" 2>/dev/null || true
    ip netns delete "$devices" 2>/dev/null || true
}
trap end EXIT
trap 'exit 130' INT TERM

# On the server, once: the fleet's identity, and each device's share of the demo's data.
on_server edgefl-coordinator init --host "$host" --port "$port" --enroll-port "$newcomers" --directory "$work/fleet"
on_server edgefl data demo --device left --device right --out "$work/shares"

# Enrolment: the server answers newcomers, each device exchanges its token for an identity.
on_server edgefl-coordinator enrollments --identity "$work/fleet" > "$work/enrollments.log" 2>&1 &
enrollments=$!
background=$enrollments
for name in left right; do
    on_server edgefl-coordinator enroll --name "$name" --identity "$work/fleet" > "$work/$name.token"
    on_device edgefl-agent enroll --file "$work/$name.token" --state "$work/$name"
    rm "$work/$name.token"
done
kill "$enrollments"
wait "$enrollments" 2> /dev/null || true

# On the devices: the agents, which wait for work.
background=
for name in left right; do
    on_device edgefl-agent run --data "$work/shares/$name.npz" --state "$work/$name" --profile jetson-orin-nano-8gb \
        > "$work/$name.log" 2>&1 &
    background="$background $!"
done

# On the server: the run.
on_server edgefl-coordinator run demo --identity "$work/fleet" --directory "$work/runs" \
    --set round.devices=2 --set data.test="$work/shares/test.npz" "$@"
edgefl report latest --runs "$work/runs"
