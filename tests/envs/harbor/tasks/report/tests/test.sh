#!/bin/bash
if [ "$(cat /tmp/report/report.txt)" = "$WANTED"$'\nnobody' ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
