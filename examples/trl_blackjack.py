"""TRL's GRPOTrainer trains a tiny random model on BlackJack, on a CPU: `python -m examples.trl_blackjack [STEPS]`."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from openenv_core.adapters.trl import TRLEnvironments
from rl_bridge.tiny_policy import make_tiny_policy

CALL = '<tool_call>{"name":"act","arguments":{"action":"MOVE"}}</tool_call>'
ANSWERS = [CALL.replace("MOVE", move) for move in ("hit", "stand")]
HANDS = [f"You hold ({total}). The dealer shows {total}. Hit or stand?" for total in range(2, 22)]
OPTIONS = {"max_completion_length": 128, "max_tool_calling_iterations": 4, "learning_rate": 1e-3}
HERE = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "logging_steps": 1}

with TemporaryDirectory() as folder, TRLEnvironments("blackjack", unfinished_reward=-1) as environments:
    # The model reads the words of a hand and answers with one of two calls, or nothing.
    path = str(make_tiny_policy(Path(folder, "policy"), [*HANDS, *ANSWERS], seed=0, max_length=1024))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    known = {tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(ANSWERS)}
    model.generation_config.suppress_tokens = sorted(set(range(len(tokenizer))) - known)
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=GRPOConfig(folder, max_steps=steps, num_generations=4, **OPTIONS, **HERE),
        train_dataset=environments.train_dataset,
        rollout_func=environments.rollout_func,
        reward_funcs=environments.reward_funcs,
    )
    trainer.train()
