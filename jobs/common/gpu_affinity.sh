#!/usr/bin/env bash
# Stands before the program of every rank: gives a client its GPU and a server none.
#
#   mpiexec ... jobs/common/gpu_affinity.sh PROGRAM [ARGUMENTS]
#
# The lowest ranks of a node serve, JOB_SERVERS for each of POOLED_SYSTEMS systems; the others are its
# clients 0, 1, ...; client i gets the i-th GPU of JOB_GPUS (0:1:2:3), from the first again where
# there are more clients than GPUs.
# It must be decided here, before MPI and CUDA start. CPUs are the launcher's business.
set -euo pipefail

# PALS, cray-mpich, Open MPI, MPICH, Slurm. Slurm last: other launchers run inside its batch step.
local_rank=${PALS_LOCAL_RANKID:-${PMI_LOCAL_RANK:-${OMPI_COMM_WORLD_LOCAL_RANK:-}}}
local_rank=${local_rank:-${MPI_LOCALRANKID:-${SLURM_LOCALID:-}}}
if ! [[ $local_rank =~ ^[0-9]+$ ]]; then
  echo "gpu_affinity.sh: no launcher says which rank of its node this is" >&2
  exit 2
fi

IFS=: read -r -a gpus <<<"${JOB_GPUS:-}"
client=$((local_rank - ${JOB_SERVERS:-1} * ${POOLED_SYSTEMS:-1}))
if ((client < 0 || ${#gpus[@]} == 0)); then
  export CUDA_VISIBLE_DEVICES=
else
  export CUDA_VISIBLE_DEVICES=${gpus[client % ${#gpus[@]}]}
fi
if ((client < 0)); then
  export OMP_NUM_THREADS=1
fi
if [[ ${JOB_VERBOSE:-0} == 1 ]]; then
  role=client
  ((client >= 0)) || role=server
  cpus=$(awk '/Cpus_allowed_list/ { print $2 }' /proc/self/status)
  echo "$(hostname) local rank $local_rank: $role, GPU ${CUDA_VISIBLE_DEVICES:-none}, CPUs $cpus"
fi
exec "$@"
