#!/bin/bash -l
# Runs inside an allocation of Slurm: the question-answering experiment on all its nodes.
#
#   jobs/slurm/launch.sh                      what the job scripts call
#   jobs/slurm/launch.sh MODULE [ARGUMENTS]   another module on the same ranks
#   jobs/slurm/launch.sh --help               every setting with its default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source jobs/common/lib.sh
SETTINGS=(jobs/slurm/environment.sh jobs/common/settings.sh)
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' jobs/slurm/launch.sh
  show_settings "${SETTINGS[@]}"
  exit 0
fi
[[ -n ${SLURM_JOB_ID:-} ]] ||
  die "expected to run inside a Slurm job, but SLURM_JOB_ID is not set: use sbatch"
JOB_ID=$SLURM_JOB_ID
ALLOCATED_NODES=${SLURM_JOB_NUM_NODES:?Slurm does not say how many nodes this job has}
read_settings "${SETTINGS[@]}"
source jobs/common/experiment.sh

need_count JOB_SERVERS 1
need_count JOB_CLIENTS 1
count_pooled "$( (($#)) || echo "$JOB_SYSTEMS")" # another module has the servers of one
RANKS_PER_NODE=$((JOB_SERVERS * POOLED_SYSTEMS + JOB_CLIENTS))
cpus_per_rank=$((${SLURM_CPUS_ON_NODE:-RANKS_PER_NODE} / RANKS_PER_NODE))
((cpus_per_rank >= 1)) ||
  die "$RANKS_PER_NODE ranks on a node, but this job has only ${SLURM_CPUS_ON_NODE} CPU(s) there:" \
    "submit with --exclusive, or set JOB_CLIENTS or JOB_SYSTEMS"
[[ $JOB_THREADS != automatic ]] || JOB_THREADS=$cpus_per_rank
[[ $JOB_GPUS != automatic ]] || JOB_GPUS=$(seq -s : 0 "$((${SLURM_GPUS_ON_NODE:-0} - 1))")

run_ranks() {
  local nodes=$1 verbosely=
  shift
  [[ $JOB_VERBOSE == 0 ]] || verbosely=verbose,
  srun "${plugin[@]}" --nodes="$nodes" --ntasks="$((nodes * RANKS_PER_NODE))" \
    --ntasks-per-node="$RANKS_PER_NODE" --distribution=block --cpus-per-task="$cpus_per_rank" \
    --cpu-bind="${verbosely}cores" --kill-on-bad-exit=1 --export=ALL \
    "$PWD/jobs/common/gpu_affinity.sh" "$@"
}

once_per_node() {
  local nodes=$1
  shift
  srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --export=ALL "$@"
}

load_modules
command -v srun >/dev/null || die "no srun on the PATH"
plugin=()
[[ -z $JOB_SRUN_MPI ]] || plugin=(--mpi="$JOB_SRUN_MPI")
run_job "$@"
