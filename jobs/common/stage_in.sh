#!/usr/bin/env bash
# Copies a folder to storage of this node; run once on each node.
#
#   stage_in.sh SOURCE TARGET
#
# TARGET appears whole or not at all. Links are followed: a Hugging Face cache is made of them.
set -euo pipefail
source=$1 target=$2

parent=$(dirname "$target")
if ! mkdir -p "$parent" || ! [[ -w $parent ]]; then
  echo "stage_in.sh: $(hostname): cannot write to $parent; set JOB_SCRATCH, or JOB_STAGE=0" >&2
  exit 2
fi
draft=$(mktemp -d "$target.XXXXXX")
trap 'rm -rf "$draft"' EXIT
cp -rL "$source/." "$draft"
chmod 755 "$draft"
if ! mv -T "$draft" "$target" 2>/dev/null; then
  # Another process of this node came first: what it made is whole.
  [[ -d $target ]]
fi
