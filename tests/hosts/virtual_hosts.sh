#!/usr/bin/env bash
# Separate hosts on one machine: network namespaces on a bridge. Root only.
#
#   virtual_hosts.sh up NAME SUBNET COUNT [RATE]   hosts NAME0, NAME1 ... at SUBNET.1, SUBNET.2 ...
#                                                  the bridge NAMEbr at SUBNET.254 reaches them all;
#                                                  RATE (tc notation, such as 1gbit) caps each link
#   virtual_hosts.sh down NAME                     take all of it away again
set -euo pipefail

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

"$@"
