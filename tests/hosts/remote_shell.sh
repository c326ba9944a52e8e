#!/usr/bin/env bash
# What mpiexec takes for rsh: runs a command in the network namespace that has the host's name,
# with a host name, IPC and shared memory of its own, so that only the wire is shared.
set -euo pipefail
while [[ ${1:-} == -* ]]; do shift; done
host=$1
shift
exec ip netns exec "$host" unshare --uts --ipc --mount \
  bash -c "hostname $host && mount -t tmpfs tmpfs /dev/shm && $*"
