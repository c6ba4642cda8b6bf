"""Supervised fine-tuning: a tiny model is taught to call tools, from scripted solvers' traces."""
