# Functions of all job scripts. Sourced, never run: needs bash 4, does nothing by itself.
# shellcheck shell=bash

die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 2
}

# need_count NAME LEAST: the variable NAME must hold a whole number of at least LEAST.
need_count() {
  local name=$1 least=$2 value=${!1}
  if ! [[ $value =~ ^[0-9]{1,9}$ ]] || ((10#$value < least)); then
    die "$name: expected a whole number of at least $least, given '$value'"
  fi
}

# count_pooled SYSTEMS: POOLED_SYSTEMS, how many of these names (a,b) have servers of their own; where
# none has, clients need those of one.
count_pooled() {
  local name
  POOLED_SYSTEMS=0
  for name in ${1//,/ }; do
    case $name in
      prefix_node | evostore | ptstore) POOLED_SYSTEMS=$((POOLED_SYSTEMS + 1)) ;;
    esac
  done
  ((POOLED_SYSTEMS)) || POOLED_SYSTEMS=1
}

# read_settings FILE...: first the user's own file, then defaults for what is not set yet.
read_settings() {
  local file
  if [[ -n ${JOB_SETTINGS:-} ]]; then
    [[ -r $JOB_SETTINGS ]] || die "JOB_SETTINGS: expected a file, given '$JOB_SETTINGS'"
    set -- "$JOB_SETTINGS" "$@"
  fi
  for file in "$@"; do
    # shellcheck disable=SC1090  # the user's own file among them
    source "$file"
  done
}

# show_settings FILE...: the documentation of the settings is the code that gives their defaults.
show_settings() {
  # The first file that has a setting wins, as when they are read.
  sed -nE 's/^: "\$\{([A-Z_]+)=(.*)\}"  # (.*)$/\1\t\2\t\3/p' "$@" |
    awk -F '\t' '!seen[$1]++ { printf "  %-24s %s\n  %24s   default: %s\n", $1, $3, "",
                               $2 == "" ? "(empty)" : $2 }'
}

# load_modules: JOB_MODULES, found in JOB_MODULE_PATHS too. Module systems use unset variables.
load_modules() {
  local name
  [[ -n $JOB_MODULES ]] || return 0
  type module >/dev/null 2>&1 ||
    die "JOB_MODULES names '$JOB_MODULES', but there is no command 'module': is this the machine?"
  set +u
  for name in ${JOB_MODULE_PATHS//:/ }; do
    module use "$name"
  done
  for name in $JOB_MODULES; do
    module load "$name" || die "module load $name failed: see 'module avail', set JOB_MODULES"
  done
  set -u
}
