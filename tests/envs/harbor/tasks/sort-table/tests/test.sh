#!/bin/bash
# Runs from the working folder.
if [ "$(cat people.csv)" = $'name,age\nBob,9\nCleo,21\nAda,36' ] && [ ! -e people.bak ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
