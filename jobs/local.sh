#!/usr/bin/env bash
# The main job on one machine: ranks of this host in virtual nodes, a wire between them.
#
#   jobs/local.sh [--ranks N] [--nodes N] [--wire WIRE] [--] [OPTIONS OF THE DRIVER]
#
#   --ranks N     ranks in all; of each node one serves for each pooled system, the others are
#                 clients (default: one client on each node)
#   --nodes N     virtual nodes, of consecutive ranks (default 2)
#   --wire WIRE   what carries the bytes between nodes (default tcp):
#                   tcp      TCP; with MPICH by UCX
#                   ofi      TCP by libfabric (MPICH only)
#                   memory   whatever MPI takes on one host; fast, but no wire
#   -h, --help    this text
#
# All further options are the driver's (python -m experiments.exp_qa_replay --help); without
# --systems these are vanilla,prefix,evostore,ptstore. For example
#
#   jobs/local.sh --ranks 9 --nodes 3 --dataset embedded --context-tokens 512 --requests 12
#
# PYTHON names the interpreter (default .venv/bin/python, which `make setup` makes); mpiexec is the
# one beside it, else the one on the PATH. Results land in results/exp_qa_replay.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source jobs/common/lib.sh

ranks='' nodes=2 wire=tcp
while (($#)); do
  case $1 in
    --ranks | --nodes | --wire)
      (($# > 1)) || die "$1: expected a value"
      declare "${1#--}=$2"
      shift 2
      ;;
    -h | --help)
      sed -n '2,/^[^#]/s/^# \{0,1\}//p' jobs/local.sh
      exit 0
      ;;
    --)
      shift
      break
      ;;
    *) break ;;
  esac
done
need_count nodes 1
systems=
for ((place = 1; place <= $#; place++)); do
  case ${!place} in
    --systems) next=$((place + 1)) systems=${!next:-} ;;
    --systems=*) systems=${!place#*=} ;;
  esac
done
[[ -n $systems ]] || set -- --systems "${systems:=vanilla,prefix,evostore,ptstore}" "$@"
count_pooled "$systems"
least=$((nodes * (POOLED_SYSTEMS + 1))) # on each node a server for each of them, and a client
ranks=${ranks:-$least}
need_count ranks "$least"
python=${PYTHON:-.venv/bin/python}
[[ -x $python ]] || die "expected an interpreter at $python: run 'make setup', or set PYTHON"
mpiexec=$(dirname "$python")/mpiexec
[[ -x $mpiexec ]] || mpiexec=$(command -v mpiexec) || die "no mpiexec beside $python or on the PATH"

options=()
if [[ $("$mpiexec" --version 2>&1) == *"Open MPI"* ]]; then
  options=(--oversubscribe --bind-to none)
  export PTSTORE_VIRTUAL_NODE_COUNT=$nodes
  case $wire in
    tcp) export OMPI_MCA_pml=ob1 OMPI_MCA_btl=tcp,self OMPI_MCA_osc=^ucx ;;
    memory) ;;
    *) die "--wire: with Open MPI expected tcp or memory, given '$wire'" ;;
  esac
else
  export MPIR_CVAR_NUM_CLIQUES=$nodes MPIR_CVAR_CLIQUES_BY_BLOCK=1
  case $wire in
    tcp) export UCX_TLS=tcp,self ;;
    ofi) export MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp ;;
    memory) ;;
    *) die "--wire: expected tcp, ofi or memory, given '$wire'" ;;
  esac
fi
export HF_HUB_OFFLINE=1 EXPERIMENT_JOB_SCRIPT=$PWD/jobs/local.sh
exec "$mpiexec" "${options[@]}" -n "$ranks" "$python" -m mpi4py -m experiments.exp_qa_replay "$@"
