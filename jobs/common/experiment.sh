# The course of a job, the same on every machine. Sourced by a launch.sh that has defined
#
#   run_ranks NODES PROGRAM...        servers and clients on each of NODES nodes
#   once_per_node NODES PROGRAM...    one process on each of NODES nodes
#
# and has set ALLOCATED_NODES and JOB_ID. A node has JOB_SERVERS ranks for each of POOLED_SYSTEMS
# systems (`count_pooled`), then JOB_CLIENTS.
# shellcheck shell=bash

# What ranks must see, whatever a launcher passes on by itself.
RANK_VARIABLES=(
  HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_HOME XDG_CACHE_HOME MPLCONFIGDIR TMPDIR OMP_NUM_THREADS
  VLLM_CACHE_ROOT TRITON_CACHE_DIR PYTHONNOUSERSITE EXPERIMENT_JOB_SCRIPT JOB_SERVERS
  POOLED_SYSTEMS JOB_GPUS JOB_VERBOSE PTSTORE_SERVERS_PER_NODE PTSTORE_MEMORY_BYTES
  PTSTORE_COPY_THREADS PTSTORE_STALL_DIR
)

# run_job [MODULE ARGUMENTS...]: the question-answering experiment, or another module.
run_job() {
  local counts count servers=$((JOB_SERVERS * POOLED_SYSTEMS))
  check_settings
  IFS=: read -r -a counts <<<"${JOB_NODE_COUNTS:-$ALLOCATED_NODES}"
  for count in "${counts[@]}"; do
    need_count count 1
    ((count <= ALLOCATED_NODES)) || die "JOB_NODE_COUNTS asks for a run on $count nodes," \
      "but this allocation has $ALLOCATED_NODES: submit with more nodes or set JOB_NODE_COUNTS"
  done
  [[ $JOB_VENV == /* ]] || JOB_VENV=$PWD/$JOB_VENV
  python=$JOB_VENV/bin/python
  [[ -x $python ]] || die "expected the environment in $JOB_VENV, found no $python:" \
    "build it on a login node first (jobs/README.md)"
  if [[ $JOB_ENGINE == vllm ]]; then
    has_vllm || die "JOB_ENGINE=vllm: vLLM is not installed in $JOB_VENV (jobs/README.md)"
  fi
  keep_script
  describe_job
  find_model
  set_environment
  trap clean_up EXIT
  if [[ $JOB_STAGE == 1 ]]; then
    stage_in
  fi
  if [[ $JOB_DOCTOR == 1 ]]; then
    echo "== ptstore doctor"
    PTSTORE_SERVERS_PER_NODE=$servers run_ranks "$ALLOCATED_NODES" \
      "$python" -m mpi4py -m ptstore_mpi doctor  # the roles that ranks will have
  fi
  for count in "${counts[@]}"; do
    echo "== $count node(s), $((count * servers)) server(s), $((count * JOB_CLIENTS)) client(s)"
    if (($#)); then
      run_ranks "$count" "$python" -m mpi4py -m "$@"
    else
      replay "$count"
    fi
  done
  echo "== results are in $JOB_RESULTS"
}

replay() {
  local nodes=$1 arguments
  # shellcheck disable=SC2206  # options are split at blanks
  arguments=(
    --systems "$JOB_SYSTEMS" --dataset "$JOB_DATASET" --model "$JOB_MODEL" --output "$JOB_RESULTS"
    --engine "$JOB_ENGINE" --dtype "$JOB_DTYPE"
    --context-tokens "$JOB_CONTEXT_TOKENS" --documents "$JOB_DOCUMENTS"
    --requests "$((JOB_REQUESTS_PER_CLIENT * JOB_CLIENTS * nodes))"
    --memory-bytes-per-node "$JOB_MEMORY" --threads "$JOB_THREADS" $JOB_ARGS
  )
  run_ranks "$nodes" "$python" -m mpi4py -m experiments.exp_qa_replay "${arguments[@]}"
}

check_settings() {
  local name
  for name in JOB_SERVERS JOB_CLIENTS JOB_THREADS JOB_REQUESTS_PER_CLIENT; do
    need_count "$name" 1
  done
  [[ $JOB_ENGINE == transformers || $JOB_ENGINE == vllm ]] ||
    die "JOB_ENGINE: expected transformers or vllm, given '$JOB_ENGINE'"
  [[ " $JOB_ARGS" != *" --systems"* ]] ||
    die "JOB_ARGS: how many ranks serve depends on the systems: name them in JOB_SYSTEMS"
  mkdir -p "$JOB_RESULTS" || die "JOB_RESULTS: cannot make the folder $JOB_RESULTS"
  JOB_RESULTS=$(cd "$JOB_RESULTS" && pwd)
  if [[ $JOB_DATASET != embedded && ! -d ${PTSTORE_DATA:-}/$JOB_DATASET ]]; then
    die "JOB_DATASET=$JOB_DATASET: expected the folder $JOB_DATASET in PTSTORE_DATA," \
      "which is '${PTSTORE_DATA:-}'"
  fi
}

# Whether ranks will find vLLM. Importing it would take half a minute.
has_vllm() {
  "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'
}

# The scheduler runs a copy of the script as it was submitted; keep that copy beside the results,
# whose attribute job_script_sha256 is its hash.
keep_script() {
  if [[ -r ${EXPERIMENT_JOB_SCRIPT:-} ]]; then
    mkdir -p "$JOB_RESULTS/jobs"
    cp "$EXPERIMENT_JOB_SCRIPT" "$JOB_RESULTS/jobs/$JOB_ID.sh"
    export EXPERIMENT_JOB_SCRIPT=$JOB_RESULTS/jobs/$JOB_ID.sh
  else
    export EXPERIMENT_JOB_SCRIPT=
  fi
}

describe_job() {
  echo "== job $JOB_ID, $(date -u +%Y-%m-%dT%H:%M:%SZ), $ALLOCATED_NODES node(s)"
  echo "commit         $(git rev-parse HEAD 2>/dev/null || echo unknown)"
  echo "job script     ${EXPERIMENT_JOB_SCRIPT:-none}"
  if [[ -n $JOB_MODULES ]]; then
    echo "modules        ${LOADEDMODULES:-$JOB_MODULES}"
  fi
}

find_model() {
  # No MPI is started here, and the cache is the one that was filled on the login node.
  [[ -n $JOB_MODEL ]] || JOB_MODEL=$("$python" -m ptstore_mpi.integrations.smollm2) ||
    die "the embedded model cannot be prepared; set JOB_MODEL to a model's folder"
  if [[ ! -f $JOB_MODEL/config.json || ! -f $JOB_MODEL/tokenizer.json ]]; then
    die "JOB_MODEL: expected a folder with config.json and tokenizer.json, given '$JOB_MODEL'"
  fi
  echo "model          $JOB_MODEL"
}

set_environment() {
  node_folder=$JOB_SCRATCH/ptstore-$(id -un)-$JOB_ID
  export JOB_SERVERS POOLED_SYSTEMS JOB_GPUS JOB_VERBOSE
  # Compute nodes have no network: nothing may try to look anything up.
  export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
  export HF_HOME=$node_folder/cache XDG_CACHE_HOME=$node_folder/cache
  export MPLCONFIGDIR=$node_folder/cache/matplotlib
  export VLLM_CACHE_ROOT=$node_folder/cache/vllm TRITON_CACHE_DIR=$node_folder/cache/triton
  export TMPDIR=$JOB_TMPDIR OMP_NUM_THREADS=$JOB_THREADS PYTHONNOUSERSITE=1
  export PTSTORE_SERVERS_PER_NODE=$JOB_SERVERS PTSTORE_MEMORY_BYTES=$JOB_MEMORY
  export PTSTORE_STALL_DIR=${PTSTORE_STALL_DIR:-$JOB_RESULTS}
  # Each client has cores of its own; the store would share them out among the node's clients.
  export PTSTORE_COPY_THREADS=${PTSTORE_COPY_THREADS:-$((JOB_THREADS < 4 ? JOB_THREADS : 4))}
}

stage_in() {
  local begin=$SECONDS
  once_per_node "$ALLOCATED_NODES" "$PWD/jobs/common/stage_in.sh" "$JOB_MODEL" "$node_folder/model"
  JOB_MODEL=$node_folder/model
  if [[ $JOB_DATASET != embedded ]]; then
    once_per_node "$ALLOCATED_NODES" "$PWD/jobs/common/stage_in.sh" \
      "$PTSTORE_DATA/$JOB_DATASET" "$node_folder/data/$JOB_DATASET"
    export PTSTORE_DATA=$node_folder/data
    RANK_VARIABLES+=(PTSTORE_DATA)
  fi
  echo "staged in      $node_folder, $((SECONDS - begin)) s"
}

clean_up() {
  once_per_node "$ALLOCATED_NODES" rm -rf "$node_folder" || true
}
