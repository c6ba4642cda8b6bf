#!/bin/bash
cd /app
[ "$(./shout rope)" = ROPE ] && [ -s /logs/artifacts/done.txt ] && echo 1 > /logs/verifier/reward.txt && exit
echo 0.0 > /logs/verifier/reward.txt
