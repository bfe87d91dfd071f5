#!/usr/bin/env bash
# The first hour on a GPU, in three calls of at most 470 seconds each, the most valuable facts first.
#
#     bash benchmarks/gpu.sh FOLDER 1     checks and times of the mLSTM, the scan, Gated DeltaNet, KDA and the convolution
#     bash benchmarks/gpu.sh FOLDER 2     the GPU tests; those that failed once more, with all launches recorded; a few
#                                         tiny cases under compute-sanitizer, if it is installed
#     bash benchmarks/gpu.sh FOLDER 3     the cases of 1 beside other packages; checks and times of all other cases
#
# Further arguments are passed to gpu.py. Each call begins with the versions of everything. An interrupted call loses
# nothing that was finished: tables are written after every line, results of tests (tests.jsonl) as they arrive. Of
# failures, failures-N.tar.gz holds the compiled code and the memory around each launch (benchmarks/launches.py).
#
# It needs torch, triton, pytest, pytest-xdist, hypothesis, einops, numpy, rich and PyYAML; it installs and downloads
# nothing. To look for faults of the script itself without a GPU: TRITON_INTERPRET=1 bash benchmarks/gpu.sh FOLDER 1
# --rehearse --case conv.
#
# Other packages take part if Python can import them. If you cannot install packages, put their wheels (pure Python,
# with missing dependencies: mlstm_kernels, flash-linear-attention, fla-core, einops) into a folder, and name it with
# PEERS=WHEELS. They are unpacked, not installed, into a folder that follows this checkout on PYTHONPATH. To do the same
# by hand:
#
#     for wheel in WHEELS/*.whl; do python3 -m zipfile -e "$wheel" UNPACKED; done; export PYTHONPATH=.:UNPACKED
#
# Variables: SECONDS_IN_ALL (470), WORKERS (one per processor, at most 16), SHAPES (1: of each case), PYTHON (python3),
# PEERS, SANITIZER (empty: no compute-sanitizer).
set -u -o pipefail
cd "$(dirname "$0")/.."
out=${1:?folder for the results}
part=${2:?1, 2 or 3: see the head of this file}
shift 2
mkdir -p "$out"
python=${PYTHON:-python3}
processors=$(nproc)
workers=${WORKERS:-$((processors < 16 ? processors : 16))}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TRITON_INTERPRET=${TRITON_INTERPRET:-0}
kept=$(mktemp -d)  # of failures
trap 'rm -rf "$kept"' EXIT
failed=0

if [ -n "${PEERS:-}" ]; then
    unpacked=$kept.peers
    trap 'rm -rf "$kept" "$unpacked"' EXIT
    for wheel in "$PEERS"/*.whl; do "$python" -m zipfile -e "$wheel" "$unpacked"; done
    # only in part 3, because a dependency of a peer may shadow another package
    [ "$part" = 3 ] && export PYTHONPATH=.:$unpacked
fi

"$python" benchmarks/preflight.py 2>&1 | tee "$out/preflight-$part.log"

left() { echo $((${SECONDS_IN_ALL:-470} - 15 - SECONDS)); }  # 15 s: for packing failures

# benchmark SECONDS ARGUMENTS
benchmark() {
    local seconds=$1
    shift
    timeout -k 5 $((seconds + 5)) "$python" benchmarks/gpu.py --out "$out" --failures "$kept/failures" \
        --shapes "${SHAPES:-1}" --minutes "$(awk "BEGIN { print ($seconds - 5) / 60 }")" "$@" 2>&1 |
        tee -a "$out/benchmark-$part.log" || failed=1
}

# tests SECONDS RESULTS ARGUMENTS: compile within each process, which would otherwise start a pool; load only the named
# pytest plugins
tests() {
    local seconds=$1 results=$2
    shift 2
    TORCHINDUCTOR_COMPILE_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 timeout -s INT -k 5 "$seconds" \
        "$python" -m pytest -m gpu --tb=short -p xdist -n "$workers" --maxschedchunk 1 -o faulthandler_timeout=60 \
        --continue-on-collection-errors --results "$out/$results" "$@" 2>&1 | tee -a "$out/tests.log" || failed=1
}

# sanitised SECONDS TOOL ARGUMENTS: without torch's cache of memory, in which all accesses are valid
sanitised() {
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout -k 5 "$1" compute-sanitizer --tool "$2" --error-exitcode 9 \
        --print-limit 20 "$python" benchmarks/gpu.py --tiny --case conv --case mlstm_step --case gated_delta \
        --case scan_once "${@:3}" 2>&1 | tee "$out/$2.log" | tail -25 || failed=1
}

case $part in
    1) benchmark "$(left)" --part first --stage checks --stage ours --stage float32 "$@" ;;
    2)
        sanitizer=${SANITIZER-$(command -v compute-sanitizer)}
        tests $(($(left) - 75 - ${sanitizer:+11}0)) tests.jsonl tests/torch/test_{stream,models_on_device}.py \
            tests/kernels/test_{self_check_on_device,linear_attention_triton,mlstm,selective_scan,slstm}.py \
            tests/kernels/test_{torch_on_device,conformance}.py
        "$python" tests/results.py "$out/tests.jsonl" | tee "$out/tests.txt"
        "$python" tests/results.py "$out/tests.jsonl" --failed 12 > "$kept/names"
        if [ -s "$kept/names" ]; then
            failed=1
            tests 70 tests-again.jsonl --record-launches "$kept/failures" "@$kept/names"
        fi
        if [ -n "$sanitizer" ]; then
            sanitised $(($(left) / 2)) memcheck "$@"
            sanitised "$(left)" racecheck "$@"
        fi
        ;;
    3)
        benchmark $(($(left) * 2 / 5)) --part first --stage ours --stage peers "$@"
        benchmark "$(left)" --part rest "$@"
        ;;
    *) echo "the second argument is 1, 2 or 3" >&2; exit 2 ;;
esac

"$python" benchmarks/launches.py "$kept/failures" "$out/failures-$part.tar.gz"
[ "$part" = 2 ] || cat $(ls -t "$out"/*.md | head -2)
echo "$SECONDS seconds in all; failed: $failed"
exit $failed
