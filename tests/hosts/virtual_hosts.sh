#!/usr/bin/env bash
# Separate hosts on one machine: network namespaces on a bridge. Root only.
#
#   virtual_hosts.sh up NAME SUBNET COUNT [RATE]   hosts NAME0, NAME1 ... at SUBNET.1, SUBNET.2 ...
#                                                  the bridge NAMEbr at SUBNET.254 reaches them all;
#                                                  RATE (tc notation, such as 1gbit) caps each link
#   virtual_hosts.sh down NAME                     take all of it away again
#   virtual_hosts.sh options NAME SUBNET COUNT RANKS   what MPICH's mpiexec needs to know: RANKS on
#                                                  each of these hosts
#   virtual_hosts.sh run COUNT RANKS MPIEXEC ...   all of it, around one mpiexec with the options
#                                                  and arguments that follow; LINK_RATE caps links
set -euo pipefail

here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")

up() {
  local name=$1 subnet=$2 count=$3 rate=${4:-} index host
  ip link add "${name}br" type bridge
  ip address add "$subnet.254/24" dev "${name}br"
  ip link set "${name}br" up
  for ((index = 0; index < count; index++)); do
    host=$name$index
    ip netns add "$host"
    ip link add "${host}v" type veth peer name eth0 netns "$host"
    ip link set "${host}v" master "${name}br" up
    ip -n "$host" address add "$subnet.$((index + 1))/24" dev eth0
    ip -n "$host" link set eth0 up
    ip -n "$host" link set lo up
    if [[ -n $rate ]]; then
      ip netns exec "$host" tc qdisc add dev eth0 root tbf rate "$rate" burst 1mb latency 50ms
      tc qdisc add dev "${host}v" root tbf rate "$rate" burst 1mb latency 50ms
    fi
  done
}

down() {
  local name=$1 host
  for host in $(ip netns list | cut -d' ' -f1 | grep -E "^${name}[0-9]+$" || true); do
    ip netns delete "$host"
    ip link delete "${host}v" 2>/dev/null || true  # it outlives a namespace that is still in use
  done
  ip link delete "${name}br" 2>/dev/null || true
}

options() {
  local name=$1 subnet=$2 count=$3 ranks=$4 index hosts=""
  for ((index = 0; index < count; index++)); do
    hosts+=${hosts:+,}$name$index:$ranks
  done
  echo "-launcher rsh -launcher-exec $here/remote_shell.sh" \
    "-hosts $hosts -localhost $subnet.254"
}

run() {
  local count=$1 ranks=$2 mpiexec=$3 name=pt$$b subnet=10.78.$(($$ % 250)) given
  shift 3
  if [[ $PWD$here =~ [[:space:]] ]]; then
    echo "virtual_hosts.sh: not run: mpiexec cannot reach a folder with a space in its name" >&2
    return
  fi
  # shellcheck disable=SC2064  # the name of now
  trap "down $name" EXIT
  up "$name" "$subnet" "$count" "${LINK_RATE:-}"
  read -ra given < <(options "$name" "$subnet" "$count" "$ranks")
  "$mpiexec" "${given[@]}" -n $((count * ranks)) "$@"
}

"$@"
