#!/bin/bash
{ head -1 people.csv; tail -n +2 people.csv | sort -t, -k2 -n; } > sorted.csv
mv sorted.csv people.csv
rm people.bak
