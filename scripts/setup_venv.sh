#!/usr/bin/env bash
# setup_venv.sh FOLDER WHAT: make the virtual environment FOLDER if it is missing, and install this checkout into it
# (editable). WHAT is one of
#   demo     the package, and suffix decoding where it can be built
#   dev      the same with the tools that the tests need
#   docs     the tools that build the documentation's site; they read the sources and need neither torch nor the package
#   suffix   suffix decoding or an error: builds it again where it could not be built
# Torch comes first, in the build that suits the machine, and is then held by a constraint: no later step, nor an isolated
# build, may replace it with another one. What is installed already and still fits pyproject.toml is left alone.
set -euo pipefail

if [ $# -ne 2 ]; then echo "usage: setup_venv.sh FOLDER demo|dev|docs|suffix" >&2; exit 2; fi
# Absolute before anything else: tools below change their folder. All of these may contain spaces.
mkdir -p "$1"
venv=$(cd "$1" && pwd)
what=$2
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch_version=${TORCH_VERSION:-2.13.0}
triton_version=3.7.1  # what torch 2.13's CUDA build requires; its CPU build names none
arctic_version=0.3.0
torch_cpu_index=https://download.pytorch.org/whl/cpu
installed_mark="$venv/.installed-$what"
unbuilt_mark="$venv/.no-suffix"
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

# As a URL, because pip splits its variables at spaces.
write_constraints() {
    local file="$venv/constraints.txt"
    "$venv/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$file"
    if [ "$torch_version" = 2.13.0 ]; then echo "triton==$triton_version" >>"$file"; fi
    PIP_CONSTRAINT=$("$venv/bin/python" -c 'import pathlib, sys; print(pathlib.Path(sys.argv[1]).as_uri())' "$file")
    export PIP_CONSTRAINT PIP_BUILD_CONSTRAINT=$PIP_CONSTRAINT
}

# arctic-inference (suffix trees) is a source distribution whose build imports torch; an isolated build would unpack a
# second torch. So its other build tools go to a folder of their own and it builds against the torch installed above.
build_arctic_inference() {
    local tools="$venv/build-tools" log="$venv/arctic-build.log" status=0
    say "building arctic-inference $arctic_version (needs a C++ compiler)"
    { pip install -qq --target "$tools" setuptools wheel ninja "cmake>=3.12" nanobind==2.9.2 protobuf==5.29.6 grpcio-tools &&
        PYTHONPATH=$tools PATH="$tools/bin:$PATH" pip install --no-build-isolation --no-deps \
            "arctic-inference==$arctic_version"; } >"$log" 2>&1 || status=1
    rm -rf "$tools"
    return $status
}

# Without a compiler everything but one method works, so a failure is told and remembered, and is no error.
install_suffix() {
    if installed arctic-inference; then return; fi
    if [ -f "$unbuilt_mark" ] && [ "$what" != suffix ]; then return; fi
    if build_arctic_inference; then rm -f "$unbuilt_mark"; return; fi
    local reason="arctic-inference did not build (log: $venv/arctic-build.log); is there a C++17 compiler?"
    if [ "$what" = suffix ]; then die "$reason"; fi
    touch "$unbuilt_mark"
    say "going on without the method suffix: $reason \`make suffix\` tries again."
}

installed() { "$venv/bin/python" -c "from importlib.metadata import version; version('$1')" >/dev/null 2>&1; }

is_current() {
    [ "$installed_mark" -nt pyproject.toml ] && [ "$installed_mark" -nt scripts/setup_venv.sh ] &&
        [ -z "$(find setup.py hf_specdec/kernels/native/source -newer "$installed_mark")" ] &&
        [ "$(cat "$installed_mark")" = "$PWD" ]
}

docs_requirements() {
    "$venv/bin/python" - <<'EOF'
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    print("\n".join(tomllib.load(file)["project"]["optional-dependencies"]["docs"]))
EOF
}

case $what in
    demo | docs | suffix) extra= ;;
    dev) extra=dev ;;
    *) die "nothing is called $what: demo, dev, docs or suffix." ;;
esac
if is_current && [ "$what" != suffix ]; then exit 0; fi
[ -x "$venv/bin/python" ] || make_venv
if [ "$what" = docs ]; then
    say "installing the tools for the documentation"
    docs_requirements >"$venv/docs-requirements.txt"
    pip install -qq -r "$venv/docs-requirements.txt"
    pwd >"$installed_mark"
    exit 0
fi
installed torch || install_torch
write_constraints
pip install -qq torch  # what a wheel installed with --no-deps still lacks
install_suffix
if installed arctic-inference; then extra=${extra:+$extra,}suffix; fi
say "installing hf-specdec${extra:+[$extra]}"
pip install -qq -e ".${extra:+[$extra]}"
pwd >"$installed_mark"
