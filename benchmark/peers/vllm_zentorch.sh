#!/usr/bin/env bash
# Makes an environment with vLLM's CPU build and AMD's zentorch, to compare with on a CPU of AMD:
# benchmark/peers/vllm_zentorch.sh DIRECTORY
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: $0 DIRECTORY    (a new environment; PYTHON=... chooses its interpreter)" >&2
    exit 2
fi
"$(dirname "$0")/vllm.sh" "$1" >&2
# zentorch imports `deprecated` and does not ask for it.
"$1/bin/pip" install "zentorch==2.13.0.1" deprecated
"$1/bin/python" -c "import zentorch; print('zentorch', zentorch.__version__)"
echo "now: python benchmark/offline.py --engine-env vllm-zentorch=$1/bin/python ..."
