# Settings of a job on any machine. Each can be set in the environment or in the file that
# JOB_SETTINGS names; what a machine does differently stands in its own folder and is read first.
# Set and empty is a value of its own. PTSTORE_<NAME> variables reach the
# store as they are. `launch.sh --help` prints these lines.
# shellcheck shell=bash

: "${JOB_NODE_COUNTS=}"  # nodes of each run, one run after the other (2:4:8); empty: all, once
: "${JOB_SYSTEMS=vanilla,prefix,evostore,ptstore}"  # compared systems; prefix_node is one more
: "${JOB_SERVERS=1}"  # servers on a node of each pooled system: one per network interface
: "${JOB_CLIENTS=4}"  # clients on a node: one per GPU
: "${JOB_GPUS=}"  # GPU of each client of a node (0:1:2:3); empty: none
: "${JOB_THREADS=1}"  # compute threads of a client
: "${JOB_ENGINE=transformers}"  # what computes: transformers, on the CPU; or vllm
: "${JOB_DTYPE=float32}"  # of weights and KV: float32, bfloat16 or float16
: "${JOB_MODEL=}"  # folder of a Hugging Face model with tokenizer.json; empty: the embedded one
: "${JOB_DATASET=embedded}"  # squad, wikiqa and cmu_wiki_qa are read from PTSTORE_DATA
: "${JOB_CONTEXT_TOKENS=2000}"  # document tokens in each prompt
: "${JOB_DOCUMENTS=40}"  # documents that are asked about
: "${JOB_REQUESTS_PER_CLIENT=64}"  # so that the work of a client does not depend on the nodes
: "${JOB_MEMORY=2GiB}"  # KV memory of a node, for each system as much
: "${JOB_ARGS=}"  # further options of the driver, split at blanks
: "${JOB_RESULTS=results}"  # folder of the results, seen by all nodes
: "${JOB_VENV=.venv}"  # environment to run in
: "${JOB_SCRATCH=/tmp}"  # storage of each node for model, data and caches
: "${JOB_STAGE=1}"  # 1: copy model and data to JOB_SCRATCH first; 0: read them where they are
: "${JOB_DOCTOR=1}"  # 1: begin with `ptstore doctor` on all nodes
: "${JOB_VERBOSE=0}"  # 1: print where each rank is bound
: "${JOB_TMPDIR=/tmp}"  # TMPDIR of the ranks: short, because socket paths end at 107 characters
: "${JOB_MODULE_PATHS=}"  # folders of modules to add (a:b)
: "${JOB_MODULES=}"  # modules to load, in this order
