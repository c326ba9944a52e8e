# What Polaris does differently, and the one table of what lies where in a node of it.
# Sourced before jobs/common/settings.sh.
# shellcheck shell=bash

: "${JOB_MODULE_PATHS=/soft/modulefiles}"  # folders of modules to add (a:b)
: "${JOB_MODULES=PrgEnv-gnu conda}"  # modules to load, in this order
: "${JOB_SERVERS=2}"  # servers on a node of each pooled system, 1 to 4: one per network interface
: "${JOB_CLIENTS=4}"  # clients on a node, 1 to 4: one per GPU
: "${JOB_GPUS=0:1:2:3}"  # GPU of each client of a node; the CPUs below fit this order
: "${JOB_THREADS=7}"  # compute threads of a client: the cores of a quarter but one
: "${JOB_SCRATCH=/local/scratch}"  # the SSDs of each node, wiped after the job
: "${JOB_CPU_BIND=near}"  # near: by the table; depth: equal shares; or what --cpu-bind takes

# A node is one CPU of 4 quarters with 8 cores each, 2 network interfaces and 4 GPUs:
#
#   quarter   cores    second threads   GPU   interface
#   0          0-7         32-39         3        0
#   1          8-15        40-47         2
#   2         16-23        48-55         1        1
#   3         24-31        56-63         0
#
# The first core of a quarter is kept for a server, those at an interface first; client i has the
# other seven cores of the quarter at GPU i. Halves of the CPU share an interface. Server i of each
# system has the same place: systems take turns, and none shall have a better one.
SERVER_CPUS=("0,32" "16,48" "8,40" "24,56")
SERVER_INTERFACES=(0 1 0 1)
CLIENT_CPUS=(25-31 17-23 9-15 1-7)
CLIENT_INTERFACES=(1 1 0 0)

# equal_share: cores of each rank of a node where all get the same.
equal_share() {
  echo $((32 / (JOB_SERVERS * POOLED_SYSTEMS + JOB_CLIENTS)))
}

# of_servers PLACE...: OF_SERVERS, these for the servers of each system.
of_servers() {
  local system
  OF_SERVERS=()
  for ((system = 0; system < POOLED_SYSTEMS; system++)); do
    OF_SERVERS+=("$@")
  done
}

# bind_list: the CPUs of local ranks 0, 1, ... as `mpiexec --cpu-bind` takes them.
bind_list() {
  of_servers "${SERVER_CPUS[@]:0:JOB_SERVERS}"
  local cpus=("${OF_SERVERS[@]}" "${CLIENT_CPUS[@]:0:JOB_CLIENTS}")
  local IFS=:
  echo "list:${cpus[*]}"
}

# interface_map: the local ranks of each interface, as MPICH_OFI_NIC_MAPPING takes them. MPI's own
# choice, blocks of ranks, would put both servers on one interface.
interface_map() {
  of_servers "${SERVER_INTERFACES[@]:0:JOB_SERVERS}"
  local of=("${OF_SERVERS[@]}" "${CLIENT_INTERFACES[@]:0:JOB_CLIENTS}")
  local interface rank ranks map=()
  for interface in 0 1; do
    ranks=
    for rank in "${!of[@]}"; do
      if ((of[rank] == interface)); then
        ranks+=${ranks:+,}$rank
      fi
    done
    [[ -z $ranks ]] || map+=("$interface:$ranks")
  done
  local IFS=';'
  echo "${map[*]}"
}
