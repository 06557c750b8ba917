# shellcheck shell=bash
# What demo.sh and pipeline.sh share; they source it, and are then in the repository root with .venv in place.

cd -P "$(dirname "${BASH_SOURCE[0]}")/.." || exit
bash scripts/setup.sh
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX # an active foreign environment must not leak in

bold='' plain=''
if [ -t 1 ]; then bold=$'\033[1m' plain=$'\033[0m'; fi
step() { printf '\n%s== %s%s\n' "$bold" "$*" "$plain"; }

# Print the command as one can type it in this folder, then run it.
show() {
  local line="$ $1" word
  for word in "${@:2}"; do
    if [[ "$word" == --* && ${#line} -gt 70 ]]; then
      printf '%s \\\n' "$line"
      line="    $word"
    else
      line="$line $word"
    fi
  done
  printf '%s\n' "$line"
  "$@"
}

# The same, with the seconds that it took in $seconds.
timed() {
  local started=$SECONDS
  show "$@"
  # shellcheck disable=SC2034 # for the scripts
  seconds=$((SECONDS - started))
}
