#!/bin/bash
mkdir -p /tmp/report
printf "%s\nnobody\n" "$REPORT_NAME" > /tmp/report/report.txt
