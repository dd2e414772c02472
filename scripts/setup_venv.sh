#!/usr/bin/env bash
# setup_venv.sh FOLDER EXTRA: make the virtual environment FOLDER if it is missing, and install this checkout into it
# (editable) with the optional dependencies EXTRA. Torch comes first, in the build that suits the machine, and is then
# held by a constraint: no later step, nor an isolated build, may replace it with another one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$1
extra=$2
torch_version=${TORCH_VERSION:-2.13.0}
triton_version=3.7.1  # what torch 2.13's CUDA build requires; its CPU build names none
arctic_version=0.3.0
torch_cpu_index=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '==> %s\n' "$*"; }
die() { printf 'setup_venv.sh: %s\n' "$*" >&2; exit 1; }
pip() { "$venv/bin/python" -m pip "$@"; }

usable_python() { "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        usable_python "$PYTHON" || die "PYTHON=$PYTHON is not a Python >= 3.10 with the venv module."
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3 python3.12 python3.13 python3.10; do
        if usable_python "$candidate"; then echo "$candidate"; return; fi
    done
    die "no Python >= 3.10 with the venv module was found (on Debian and Ubuntu: apt-get install python3-venv);" \
        "name one with PYTHON=..."
}

make_venv() {
    local python
    python=$(find_python)
    say "making $venv with $("$python" -V)"
    "$python" -m venv "$venv"
}

has_nvidia_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }

install_torch() {
    if [ "$(uname -s)" != Linux ] || has_nvidia_gpu; then
        say "installing torch $torch_version"
        pip install "torch==$torch_version"
        return
    fi
    say "installing torch $torch_version, CPU build"
    # A wheel in a local folder (pip's find-links) spares the download and any wait for an index out of reach.
    pip install -qq --no-deps --no-index "torch==$torch_version+cpu" 2>/dev/null ||
        pip install --retries 1 --extra-index-url "$torch_cpu_index" "torch==$torch_version+cpu" ||
        { say "no CPU build to be had: installing the standard one (several GB)"; pip install "torch==$torch_version"; }
}

write_constraint() {
    "$venv/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$venv/constraints.txt"
    if [ "$torch_version" = 2.13.0 ]; then echo "triton==$triton_version" >>"$venv/constraints.txt"; fi
}

# arctic-inference (suffix trees) is a source distribution whose build imports torch; an isolated build would unpack a
# second torch. So its other build tools go to a folder of their own and it builds against the torch installed above.
build_arctic_inference() {
    local tools="$venv/build-tools" log="$venv/arctic-build.log"
    say "building arctic-inference $arctic_version (needs a C++ compiler)"
    pip install -qq --target "$tools" setuptools wheel ninja "cmake>=3.12" nanobind==2.9.2 protobuf==5.29.6 grpcio-tools \
        >"$log" 2>&1 &&
        PYTHONPATH=$tools PATH="$tools/bin:$PATH" pip install --no-build-isolation --no-deps \
            "arctic-inference==$arctic_version" >>"$log" 2>&1 ||
        { tail -n 5 "$log" >&2; die "arctic-inference did not build. A C++17 compiler (g++, clang++)? The log: $log"; }
    rm -rf "$tools"
}

installed() { "$venv/bin/python" -c "from importlib.metadata import version; version('$1')" >/dev/null 2>&1; }

[ -x "$venv/bin/python" ] || make_venv
installed torch || install_torch
write_constraint
export PIP_CONSTRAINT="$venv/constraints.txt" PIP_BUILD_CONSTRAINT="$venv/constraints.txt"
pip install -qq torch  # what a wheel installed with --no-deps still lacks
installed arctic-inference || build_arctic_inference
say "installing hf-specdec[$extra]"
pip install -qq -e ".[$extra]"
