#!/usr/bin/env bash
# The sweep on one host with two GPUs: recompute, readback and append through pdctl's router.
# usage: run.sh SHAPE...        (shapes: qwen3-32b, mistral-large-36-layers, tiny, tiny-llama)
# Needs: a Python with vLLM, NIXL, pdctl[router] and ./random_weights installed.
# Environment: PYTHON (default python3), OUT (results, default ./out), LIMIT (seconds in all),
#   REPEATS, LENGTHS, ARMS, GROW (repeats of the growing conversation afterwards, 0 for none), SPEC_KEYS
#   (key=value of make_spec.py), BENCH_FLAGS (of pdctl bench)
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
began=$(date +%s)
export PYTHON=${PYTHON:-$(command -v python3)} OUT=${OUT:-$PWD/out}
export PDCTL_STATE_DIR=${PDCTL_STATE_DIR:-/tmp/pdctl-gpu-state} PYTHONUNBUFFERED=1
limit=${LIMIT:-3600} lengths=${LENGTHS:-2048,4096,8192,12288,16384,20480,24576}
work=${WORK:-/tmp/pdctl-gpu}
mkdir -p "$OUT" "$work"

left() { echo $((began + limit - $(date +%s))); }
say() { echo "[$(($(date +%s) - began)) s] $*"; }
pdctl() { "$PYTHON" -c 'import sys; from pdctl.cli import main; sys.argv[0] = "pdctl"; main()' "$@"; }

running=
# shellcheck disable=SC2329  # by the trap
save() {
  [ -n "$running" ] && say "stopping $running" && pdctl down "$running" --grace 5
  tar -C "$PDCTL_STATE_DIR" -czf "$OUT/logs.tar.gz" --exclude lock . 2>/dev/null
  say end
}
trap save EXIT
trap 'exit 143' TERM INT HUP

one_shape() {
  local shape=$1 name=$1 spec="$work/$1.yaml"
  name=${name//_/-}
  "$PYTHON" "$here/make_model.py" "$shape" "$work/models/$shape" || return 1
  # shellcheck disable=SC2086
  "$PYTHON" "$here/make_spec.py" "$name" "$work/models/$shape" "$PYTHON" "$spec" ${SPEC_KEYS:-} || return 1
  pdctl validate "$spec" || return 1
  pdctl render "$spec" -o "$work/$name-scripts" >/dev/null
  say "$shape: starting the legs"
  running=$name
  pdctl up "$spec" --timeout 260 || return 3
  say "$shape: up"
  grep -hiE "cross layer KV|KV cache size|model weights take|loading took|pd_connector|Backend .* instantiated" \
    "$PDCTL_STATE_DIR/$name"/*.log | sed 's/^([^)]*) *//' | cut -c1-200 | sort | uniq -c
  command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=index,memory.used --format=csv,noheader
  # shellcheck disable=SC2086
  pdctl bench "$spec" --attach --arms "${ARMS:-recompute,readback,append}" --shape second --lengths "$lengths" \
    --new-tokens 256 --answer-tokens 8 --endpoint completions --repeats "${REPEATS:-5}" \
    --deadline "$(($(left) - 25))" -o "$OUT/$name" ${BENCH_FLAGS:-}
  say "$shape: sweep ended with $?"
  if [ "${GROW:-0}" -gt 0 ] && [ "$(left)" -gt 100 ]; then
    # shellcheck disable=SC2086
    pdctl bench "$spec" --attach --arms "${ARMS:-recompute,readback,append}" --shape grow --lengths "$lengths" \
      --answer-tokens 8 --endpoint completions --repeats "$GROW" --no-age \
      --deadline "$(($(left) - 25))" -o "$work/$name-grow" ${BENCH_FLAGS:-}
    say "$shape: growing conversation ended with $?"
    tar -C "$work" -czf "$OUT/$name-grow.tar.gz" "$name-grow"
  fi
  pdctl down "$name" --grace 5
  running=
}

for shape in "$@"; do
  [ "$(left)" -lt 60 ] && say "no time left for $shape" && break
  one_shape "$shape" || { code=$?; say "$shape: FAILED"; }
done
# 3: the legs did not start.
exit "${code:-0}"
