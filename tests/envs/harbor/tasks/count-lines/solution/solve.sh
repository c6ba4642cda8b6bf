#!/bin/bash
grep -c ERROR log.txt > count.txt
