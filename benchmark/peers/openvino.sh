#!/usr/bin/env bash
# Makes an environment with OpenVINO GenAI, and a model in its format: benchmark/peers/openvino.sh DIRECTORY MODEL CONVERTED
set -euo pipefail

if [ $# -ne 3 ]; then
    echo "usage: $0 DIRECTORY MODEL CONVERTED" >&2
    echo "  DIRECTORY  a new environment; PYTHON=... chooses its interpreter" >&2
    echo "  MODEL      a checkpoint in Hugging Face format" >&2
    echo "  CONVERTED  a new directory for the model in OpenVINO's format, with weights in float16" >&2
    exit 2
fi
"${PYTHON:-python3}" -m venv "$1"
"$1/bin/pip" install "openvino-genai==2026.4.1.0" "optimum-intel[openvino]==2.2.0"
"$1/bin/optimum-cli" export openvino --model "$2" --task text-generation-with-past --weight-format fp16 "$3"
echo "now: python benchmark/offline.py --engine-env openvino=$1/bin/python --engine-arg openvino:converted=$3 ..."
