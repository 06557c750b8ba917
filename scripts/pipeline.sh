#!/usr/bin/env bash
# RLHF from end to end on the toy task of demo.sh: imitation with sft.py, a reward model that learns from
# preferences only (reward_model.py), then PPO against that reward model (ppo.py). What makes an answer right
# stays hidden from training: `exact` is among PPO's rewards with weight 0, that is, it is only measured.
# A minute and a half on two CPU cores after the installation. Everything it writes is in runs/pipeline.
#
# A reward model is a proxy. To see it overoptimised, type PPO's command again with another --output_dir and
# --kl_coef 0.05 --kl_controller fixed --num_steps 40: its score keeps rising, the hidden accuracy falls.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

OUT=runs/pipeline
rm -rf "$OUT"

step "The task: sort the digits of a number (9141= -> 1149)"
show .venv/bin/python scripts/make_toy.py --output_dir "$OUT/toy"

step "Imitation: fine-tune a random model on demonstrations of which most are mistaken"
timed .venv/bin/torchrun --standalone --nproc-per-node 1 sft.py \
  --model "$OUT/toy/model" --dataset "$OUT/toy/sft.jsonl" --output_dir "$OUT/sft" \
  --num_steps 250 --sequences_per_step 128 --max_sequence_tokens 64 \
  --learning_rate 3e-3 --lr_schedule linear --warmup_steps 20 \
  --eval_dataset "$OUT/toy/sft_eval.jsonl" --eval_every_steps 50
seconds_sft=$seconds

step "Reward model: learn to score answers from pairs of which one side is preferred"
timed .venv/bin/torchrun --standalone --nproc-per-node 1 reward_model.py \
  --model "$OUT/sft/final" --dataset "$OUT/toy/pairs.jsonl" --output_dir "$OUT/rm" \
  --num_steps 100 --pairs_per_step 64 --max_sequence_tokens 64 --learning_rate 1e-3 \
  --eval_dataset "$OUT/toy/pairs_eval.jsonl"
seconds_rm=$seconds

step "PPO: raise the reward model's score, close to the imitation (reward, eval: as that model sees it)"
timed .venv/bin/torchrun --standalone --nproc-per-node 1 ppo.py \
  --model "$OUT/sft/final" --dataset "$OUT/toy/rl.jsonl" --output_dir "$OUT/ppo" \
  --rewards "model:$OUT/rm/final" exact --reward_weights 1 0 \
  --num_steps 30 --prompts_per_step 128 --max_prompt_tokens 32 --max_response_tokens 12 \
  --learning_rate 1e-4 --critic_learning_rate 5e-4 \
  --kl_coef 3 --kl_controller adaptive --kl_controller_target 1.5 --kl_controller_horizon 2000 \
  --eval_dataset "$OUT/toy/eval.jsonl" --eval_every_steps 5

step "Result"
.venv/bin/python scripts/plot.py "$OUT/ppo" --output "$OUT/learning_curve.png" \
  --metrics rollout/reward eval/reward/exact policy/kl_response >/dev/null
.venv/bin/python scripts/demo_summary.py "$OUT" --run ppo --metric eval/reward/exact --reward_model rm \
  --seconds "sft=$seconds_sft" "rm=$seconds_rm" "ppo=$seconds"
