#!/usr/bin/env bash
# From nothing to a model improved by RL: set-up, a toy task, a warm start with sft.py, then grpo.py on vLLM.
# A few minutes on two CPU cores after the installation. Everything it writes is in runs/demo.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT"
bash scripts/setup.sh
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX # an active foreign environment must not leak in

DEMO=runs/demo
rm -rf "$DEMO"

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

step "The task: sort the digits of a number (9141= -> 1149)"
show .venv/bin/python scripts/make_toy.py --output_dir "$DEMO/toy"

step "Imitation: fine-tune a random model on demonstrations of which most are mistaken"
started=$SECONDS
show .venv/bin/torchrun --standalone --nproc-per-node 1 sft.py \
  --model "$DEMO/toy/model" --dataset "$DEMO/toy/sft.jsonl" --output_dir "$DEMO/sft" \
  --num_steps 250 --sequences_per_step 128 --max_sequence_tokens 64 \
  --learning_rate 3e-3 --lr_schedule linear --warmup_steps 20 \
  --eval_dataset "$DEMO/toy/sft_eval.jsonl" --eval_every_steps 50
seconds_sft=$((SECONDS - started))

step "Reinforcement learning: keep what earns reward (1 for the right answer, else 0)"
started=$SECONDS
show .venv/bin/torchrun --standalone --nproc-per-node 1 grpo.py \
  --model "$DEMO/sft/final" --dataset "$DEMO/toy/rl.jsonl" --rewards exact --output_dir "$DEMO/grpo" \
  --num_steps 40 --prompts_per_step 32 --samples_per_prompt 8 \
  --max_prompt_tokens 32 --max_response_tokens 12 \
  --learning_rate 3e-4 --lr_schedule linear --warmup_steps 5 \
  --eval_dataset "$DEMO/toy/eval.jsonl" --eval_every_steps 2 --eval_temperature 0.0
seconds_grpo=$((SECONDS - started))

step "Result"
.venv/bin/python scripts/plot.py "$DEMO/grpo" --output "$DEMO/learning_curve.png" >/dev/null
.venv/bin/python scripts/demo_summary.py "$DEMO" --seconds_sft "$seconds_sft" --seconds_grpo "$seconds_grpo"
