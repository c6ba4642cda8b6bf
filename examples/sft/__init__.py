"""Supervised fine-tuning: a tiny model learns to call tools from scripted solvers' traces."""
