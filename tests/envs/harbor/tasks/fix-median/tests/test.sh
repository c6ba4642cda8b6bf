#!/bin/bash
# Two rewards by name: the whole, and how much of it.
python3 /tests/judge.py > /logs/verifier/reward.json
