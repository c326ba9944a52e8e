# What Slurm tells of the machine, in place of a table. Sourced before jobs/common/settings.sh.
# shellcheck shell=bash

: "${JOB_THREADS=automatic}"  # compute threads of a client; automatic: its CPUs
: "${JOB_SCRATCH=${SLURM_TMPDIR:-/tmp}}"  # storage of each node for model, data and caches
: "${JOB_SRUN_MPI=}"  # what `srun --mpi=` takes (pmi2, pmix, cray_shasta); empty: Slurm's own
: "${JOB_GPUS=automatic}"  # GPU of each client (0:1:2:3); automatic: those of the job; empty: none
