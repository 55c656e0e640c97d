#!/bin/sh
# One of a fleet's brokers, for a container: mosquitto, told to read its files again when the coordinator has revoked a
# device, which it cannot be told from another container. At most CHECK_S seconds pass between the two.
#   broker.sh /fleet/broker/mosquitto.conf
set -eu
rules() { cat "$(dirname "$1")"/crl.pem "$(dirname "$1")"/fleet.acl 2>/dev/null | cksum; }
known=$(rules "$1")
mosquitto -c "$1" &
broker=$!
trap 'kill "$broker" 2>/dev/null' TERM INT
while kill -0 "$broker" 2>/dev/null; do
  sleep "${CHECK_S:-2}" &
  wait $! || true # a signal ends the wait
  now=$(rules "$1")
  [ "$now" = "$known" ] || kill -HUP "$broker" 2>/dev/null || true
  known=$now
done
wait "$broker"
