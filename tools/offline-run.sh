#!/usr/bin/env bash
# On a machine with GPUs and without a package index: installs the wheels of this folder, then runs
# what needs a GPU. tools/offline-wheels makes the folder.
#   bash run.sh test [--only check_forms] [--device cpu] …     the arguments of tests/gpu/with_gpu/run.py
#   bash run.sh bench [--only gpt] …                           those of python -m benchmarks.gpu
# PYTHON: an interpreter with a CUDA build of PyTorch, by default python3. Results go to the folder
# OUT, by default out/ here.
set -uo pipefail
cd "$(dirname "$0")" || exit 2
what=${1:-}
[ $# -eq 0 ] || shift
python=${PYTHON:-python3}
out=${OUT:-$PWD/out}
mkdir -p "$out"
if ! "$python" -m pip install --quiet --no-index --no-deps --no-compile --force-reinstall wheels/*.whl >"$out/pip.txt" 2>&1; then
    cat "$out/pip.txt" >&2
    exit 1
fi
{
    lscpu
    nvidia-smi
} >"$out/machine.txt" 2>&1
# mpiexec and hvdrun are where pip puts commands.
scripts=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
export PATH="$scripts:$PATH"
case $what in
test) "$python" tests/gpu/with_gpu/run.py --output "$out/logs" "$@" 2>&1 | tee "$out/test.txt" ;;
bench) "$python" -m benchmarks.gpu --output "$out/bench.json" "$@" 2>&1 | tee "$out/bench.txt" ;;
*)
    echo "run.sh: expected test or bench, not '$what'" >&2
    exit 2
    ;;
esac
