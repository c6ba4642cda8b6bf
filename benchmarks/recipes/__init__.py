"""The gain of reinforcement learning over a policy fine-tuned on a few traces, compared with longer fine-tuning."""
