#!/usr/bin/env bash
# Makes an environment with llama.cpp, built for this CPU, and a model in its format:
# benchmark/peers/llamacpp.sh DIRECTORY MODEL GGUF
set -euo pipefail

if [ $# -ne 3 ]; then
    echo "usage: $0 DIRECTORY MODEL GGUF" >&2
    echo "  DIRECTORY  a new environment; PYTHON=... chooses its interpreter" >&2
    echo "  MODEL      a checkpoint in Hugging Face format" >&2
    echo "  GGUF       a new file for the model in llama.cpp's format, with weights in bfloat16 (GGUF_TYPE=f32: float32, q8_0: 8 bits, q4_0: 4 bits)" >&2
    exit 2
fi
version=0.3.36
"${PYTHON:-python3}" -m venv "$1"
"$1/bin/pip" install scikit-build-core
# The source package holds all of llama.cpp, with the program that converts checkpoints.
"$1/bin/pip" download --no-deps --no-build-isolation --no-binary llama-cpp-python --dest "$1/source" \
    "llama-cpp-python==$version"
tar --extract --gzip --directory "$1/source" --file "$1/source/llama_cpp_python-$version.tar.gz"
source="$1/source/llama_cpp_python-$version"
# -march=native turns on what the CPU has, AVX512 with bf16 instructions included.
CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAVA_BUILD=OFF" "$1/bin/pip" install "$source"
"$1/bin/python" -c "import llama_cpp; print(llama_cpp.llama_print_system_info().decode())"
"$1/bin/pip" install "torch==2.13.0" "transformers==5.12.1" sentencepiece pyyaml
"$1/bin/python" "$(dirname "$0")/llamacpp_convert.py" "$source/vendor/llama.cpp" "$2" "$3" "${GGUF_TYPE:-bf16}"
echo "now: python benchmark/offline.py --engine-env llamacpp=$1/bin/python --engine-arg llamacpp:converted=$3 ..."
