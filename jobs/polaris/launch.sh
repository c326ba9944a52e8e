#!/bin/bash -l
# Runs inside an allocation on Polaris: the question-answering experiment on all its nodes.
#
#   jobs/polaris/launch.sh                    what the job scripts call
#   jobs/polaris/launch.sh MODULE [ARGUMENTS] another module on the same ranks
#   jobs/polaris/launch.sh --help             every setting with its default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source jobs/common/lib.sh
SETTINGS=(jobs/polaris/environment.sh jobs/common/settings.sh)
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' jobs/polaris/launch.sh
  show_settings "${SETTINGS[@]}"
  exit 0
fi
read_settings "${SETTINGS[@]}"
source jobs/common/experiment.sh

[[ -r ${PBS_NODEFILE:-} ]] ||
  die "expected to run inside a PBS job, but PBS_NODEFILE is '${PBS_NODEFILE:-}': use qsub"
JOB_ID=${PBS_JOBID:-interactive}
mapfile -t hosts < <(awk 'NF && !seen[$0]++' "$PBS_NODEFILE")
ALLOCATED_NODES=${#hosts[@]}
lines=$(grep -c . "$PBS_NODEFILE" || true)
((lines == ALLOCATED_NODES && lines > 0)) ||
  die "expected each node once in PBS_NODEFILE, found $ALLOCATED_NODES host(s) in $lines lines:" \
    "ask for -l select=N:system=polaris -l place=scatter"
for name in JOB_SERVERS JOB_CLIENTS; do
  need_count "$name" 1
  ((${!name} <= 4)) || die "$name: expected 1 to 4 on a node of Polaris, given ${!name}"
done
count_pooled "$( (($#)) || echo "$JOB_SYSTEMS")" # another module has the servers of one
RANKS_PER_NODE=$((JOB_SERVERS * POOLED_SYSTEMS + JOB_CLIENTS))

start() {
  local nodes=$1 per_node=$2 name environment=() hostfile status=0
  shift 2
  hostfile=$(mktemp)
  printf '%s\n' "${hosts[@]:0:nodes}" >"$hostfile"
  for name in "${RANK_VARIABLES[@]}" PBS_JOBID; do
    environment+=(--env "$name=${!name:-}")
  done
  mpiexec -n "$((nodes * per_node))" --ppn "$per_node" --hostfile "$hostfile" \
    "${environment[@]}" "$@" || status=$?
  rm "$hostfile"
  return "$status"
}

run_ranks() {
  local nodes=$1 binding=()
  shift
  case $JOB_CPU_BIND in
    near) binding=(--cpu-bind "$verbosely$(bind_list)") ;;
    depth) binding=(--depth "$(equal_share)" --cpu-bind "${verbosely}depth") ;;
    *) binding=(--cpu-bind "$JOB_CPU_BIND") ;;
  esac
  start "$nodes" "$RANKS_PER_NODE" "${binding[@]}" "$PWD/jobs/common/gpu_affinity.sh" "$@"
}

once_per_node() {
  local nodes=$1
  shift
  start "$nodes" 1 "$@"
}

load_modules
command -v mpiexec >/dev/null || die "no mpiexec on the PATH: is the module cray-pals loaded?"
# The store keeps its bytes in host memory, so MPI needs not know the GPUs.
export MPICH_GPU_SUPPORT_ENABLED=0
if [[ -z ${MPICH_OFI_NIC_POLICY:-} ]]; then
  export MPICH_OFI_NIC_POLICY=USER
  MPICH_OFI_NIC_MAPPING=$(interface_map)
  export MPICH_OFI_NIC_MAPPING
fi
verbosely=
if [[ $JOB_VERBOSE == 1 ]]; then
  verbosely=verbose,
  export MPICH_OFI_NIC_VERBOSE=1 MPICH_VERSION_DISPLAY=1
fi
run_job "$@"
