#!/bin/bash -l
# Builds .venv for Polaris; run once on a login node, anywhere in the repository.
#
#   jobs/polaris/build_env.sh
#   JOB_ENGINE=vllm jobs/polaris/build_env.sh      and .venv-vllm, with vLLM for the GPUs
#
# mpi4py is compiled against cray-mpich, our C++ core with the GNU compiler and without MPI; the
# versions are those of constraints.txt. Ends by preparing the embedded model, because compute
# nodes have no network. After a change of modules or of the system: rm -rf .venv, and again.
# JOB_MODULES and JOB_MODULE_PATHS say which modules are loaded (launch.sh --help).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source jobs/common/lib.sh
read_settings jobs/polaris/environment.sh jobs/common/settings.sh

load_modules
set +u
# With it `cc` links MPI to the GPUs, which login nodes do not have and we do not need.
module unload craype-accel-nvidia80
if type conda >/dev/null 2>&1; then
  conda activate base || die "conda activate base failed"
fi
set -u
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  die "expected Python 3.11 or newer, got $(python3 --version): choose another in JOB_MODULES"

# A login node allows a user few processes and threads.
export OMP_NUM_THREADS=4 MKL_NUM_THREADS=4 CMAKE_BUILD_PARALLEL_LEVEL=4
# From source and not from a cache: a wheel knows another MPI.
export MPICC=cc PIP_NO_BINARY=mpi4py PIP_NO_CACHE_DIR=1
export CC=gcc CXX=g++ PYTHONNOUSERSITE=1
make MPI=site PYTHON=python3 setup model

# check_mpi VENV: asks the library for its name without starting MPI, which a login node may not do.
check_mpi() {
  local library
  library=$("$1/bin/python" -c '
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().strip("\0\n ").splitlines()[0])')
  echo "mpi4py uses: $library"
  [[ ${library^^} == *CRAY* ]] ||
    die "expected mpi4py over cray-mpich, got '$library': rm -rf $1 and build again"
}

check_mpi .venv
if [[ $JOB_ENGINE == vllm ]]; then
  # Apart: vLLM wants versions of its own. Its wheel brings the CUDA libraries it was built with.
  python3 -m venv .venv-vllm
  .venv-vllm/bin/python -m pip install --quiet 'vllm>=0.32,<0.33' -e '.[experiments]'
  check_mpi .venv-vllm
fi
echo "Next: qsub -A PROJECT jobs/polaris/first_job.pbs"
