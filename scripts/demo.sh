#!/usr/bin/env bash
# From nothing to a model improved by RL: set-up, a toy task, a warm start with sft.py, then grpo.py on vLLM.
# A few minutes on two CPU cores after the installation. Everything it writes is in runs/demo.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

DEMO=runs/demo
rm -rf "$DEMO"

step "The task: sort the digits of a number (9141= -> 1149)"
show .venv/bin/python scripts/make_toy.py --output_dir "$DEMO/toy"

step "Imitation: fine-tune a random model on demonstrations of which most are mistaken"
timed .venv/bin/torchrun --standalone --nproc-per-node 1 sft.py \
  --model "$DEMO/toy/model" --dataset "$DEMO/toy/sft.jsonl" --output_dir "$DEMO/sft" \
  --num_steps 250 --sequences_per_step 128 --max_sequence_tokens 64 \
  --learning_rate 3e-3 --lr_schedule linear --warmup_steps 20 \
  --eval_dataset "$DEMO/toy/sft_eval.jsonl" --eval_every_steps 50
seconds_sft=$seconds

step "Reinforcement learning: keep what earns reward (1 for the right answer, else 0)"
timed .venv/bin/torchrun --standalone --nproc-per-node 1 grpo.py \
  --model "$DEMO/sft/final" --dataset "$DEMO/toy/rl.jsonl" --rewards exact --output_dir "$DEMO/grpo" \
  --num_steps 40 --prompts_per_step 32 --samples_per_prompt 8 \
  --max_prompt_tokens 32 --max_response_tokens 12 \
  --learning_rate 3e-4 --lr_schedule linear --warmup_steps 5 \
  --eval_dataset "$DEMO/toy/eval.jsonl" --eval_every_steps 2 --eval_temperature 0.0

step "Result"
.venv/bin/python scripts/plot.py "$DEMO/grpo" --output "$DEMO/learning_curve.png" >/dev/null
.venv/bin/python scripts/demo_summary.py "$DEMO" --run grpo --seconds "sft=$seconds_sft" "grpo=$seconds"
