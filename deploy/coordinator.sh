#!/bin/sh
# The coordinator of the run $EDGEFL_RUN, for a container that is started again whenever it has ended: a run that is done stays
# done, one that its operator stopped stays stopped (22), one that was killed goes on where it was.
#   coordinator.sh OPTION…
set -eu
mkdir -p -m 0700 "/runs/$EDGEFL_RUN" # --resume with a run file begins the run when there is only its directory
PGPASSWORD="$(cat /run/secrets/database)"
export PGPASSWORD
edgefl-coordinator run /config/run.yaml --resume "$EDGEFL_RUN" --unless-stopped --directory /runs --log-format json "$@" &
child=$!
trap 'signalled=1; kill "$child" 2>/dev/null' TERM INT
signalled=1
while [ "$signalled" ]; do # a signal ends the wait, not the child
  signalled=
  status=0
  wait "$child" || status=$?
done
[ "$status" = 0 ] || [ "$status" = 22 ] || exit "$status"
echo "run $EDGEFL_RUN has ended"
sleep infinity &
child=$!
wait "$child" || true
