#!/usr/bin/env bash
# Record a run that explodes, replay its batches with two repairs and with standard attention, compare. Two to four minutes on 2 CPU cores, after the install.
#   bash scripts/quickstart.sh                    makes .venv and installs into it first
#   bash scripts/quickstart.sh --python python3   uses that interpreter as it is and installs nothing
#   bash scripts/quickstart.sh --out FOLDER       puts runs, recording and results there (default: runs/quickstart)
set -euo pipefail
out=runs/quickstart python=""
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
synopsis="usage: quickstart.sh [--python INTERPRETER] [--out FOLDER]"
usage() { echo "error: $1; $synopsis" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case "$1" in -h | --help) echo "$synopsis"; sed -n '2,5s/^# //p' scripts/quickstart.sh; exit 0 ;; esac
  [ -n "${2-}" ] || usage "$1 needs a value"
  case "$1" in
    --python) case "$2" in /*) python=$2 ;; */*) python=$here/$2 ;; *) python=$2 ;; esac ;;
    --out) case "$2" in /*) out=$2 ;; *) out=$here/$2 ;; esac ;;
    *) usage "unknown option $1" ;;
  esac
  shift 2
done
if [ -n "$python" ] && ! "$python" -c "" > /dev/null 2>&1; then
  usage "--python $python does not run"
fi
for there in "$out/runs" "$out/quickstart"; do
  if [ -e "$there" ]; then
    echo "error: --out $out holds an earlier quickstart's $there: remove it or name another folder" >&2
    exit 2
  fi
done
if ! mkdir -p "$out" 2> /dev/null; then
  usage "--out $out cannot be made a folder"
fi
if [ -z "$python" ]; then
  [ -x .venv/bin/python ] || python3 -m venv .venv
  python=.venv/bin/python
  echo "== installing into .venv: 2.7 GB, some minutes in which nothing is printed"
  "$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[train]'
fi
"$python" train.py configs/quickstart.py --help > /dev/null || exit # says what that interpreter lacks
began=$SECONDS

echo "== data: the sources of Python's own library, as bytes"
"$python" scripts/prepare_data.py stdlib

# One thread a run: the order of summation, and so every bit, is the same on any number of cores.
export OMP_NUM_THREADS=1
# Gated attention (Qiu et al. 2025) fails sooner and more surely than attention without a gate: experiments/microcosm.
run() { "$python" train.py configs/quickstart.py --model.gated-attention --run.steps 800 --run.folder "$out/runs" "$@"; }
replay() { run --run.name "$1" --data.replay "$out/quickstart" --attention.default.preset "$2"; }

echo "== 1 of 4: flash attention, delta = rowsum(dO * O); its batches are recorded"
run --run.name failing --data.record "$out/quickstart"

echo "== 2, 3 and 4 of 4, side by side on the same batches: what we recommend; delta = rowsum(P * dP); standard attention (logs: $out/*.log)"
replay delta_from_p flash_delta_from_p > "$out/delta_from_p.log" 2>&1 &
delta_from_p=$!
replay standard standard > "$out/standard.log" 2>&1 &
standard=$!
trap 'kill $delta_from_p $standard 2>/dev/null || true' EXIT
replay consistent flash_consistent
wait $delta_from_p || { tail -n 3 "$out/delta_from_p.log" >&2; exit 1; }
wait $standard || { tail -n 3 "$out/standard.log" >&2; exit 1; }

echo "== result"
"$python" scripts/compare_runs.py "$out"/runs/{failing,consistent,delta_from_p,standard} --patience 50 \
  --out "$out/compare.png" --table "$out/compare.md"
echo "Only attention differs. All four runs round O to one mantissa bit; failing and delta_from_p also round it before the division by l."
echo "delta_from_p changes the backward pass alone and is stable: an error of O that enters delta makes logits grow and the loss explode."
echo "Not shown: where BF16's error comes from."
echo "== $((SECONDS - began)) s after the install; picture: $out/compare.png"
