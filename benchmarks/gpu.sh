#!/usr/bin/env bash
# Run the GPU tests of kernels and of captured streams, then benchmarks/gpu.py, within 10 minutes, and write four files
# to a folder.
#
#     bash benchmarks/gpu.sh FOLDER                          tests for up to 4 minutes, the benchmark for the rest
#     TESTS=0 bash benchmarks/gpu.sh FOLDER --case mlstm     no tests; further arguments are passed to gpu.py
#
# An interrupted run loses nothing that was finished: logs are written as they arrive, and tables after every line. It
# needs torch, triton, pytest, pytest-xdist and hypothesis; it installs and downloads nothing.
#
# Other packages take part in the benchmark if Python can import them. If you cannot install packages, put their wheels
# (pure Python, with missing dependencies: mlstm_kernels, flash-linear-attention, fla-core, einops) into a folder:
#
#     PEERS=WHEELS bash benchmarks/gpu.sh FOLDER
#
# They are unpacked, not installed, into a folder that follows this checkout on PYTHONPATH. To do the same by hand:
#
#     for wheel in WHEELS/*.whl; do python3 -m zipfile -e "$wheel" UNPACKED; done; export PYTHONPATH=.:UNPACKED
#
# Variables: SECONDS_IN_ALL (570), TESTS (240: seconds of tests), WORKERS (12), PYTHON (python3), PEERS.
set -u -o pipefail
cd "$(dirname "$0")/.."
out=${1:?folder for the results}
shift
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TRITON_INTERPRET=${TRITON_INTERPRET:-0}
if [ -n "${PEERS:-}" ]; then
    unpacked=$(mktemp -d)
    for wheel in "$PEERS"/*.whl; do "$python" -m zipfile -e "$wheel" "$unpacked"; done
fi

failed=0
if [ "${TESTS:-240}" != 0 ]; then
    # compile within each process, which would otherwise start a pool; load only the named pytest plugins
    TORCHINDUCTOR_COMPILE_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 timeout -s INT -k 15 "${TESTS:-240}" \
        "$python" -m pytest tests/kernels tests/torch/test_stream.py -m gpu -vv --tb=short -rfE \
        -p xdist -n "${WORKERS:-12}" --maxschedchunk 1 -o faulthandler_timeout=60 2>&1 | tee "$out/tests.log" |
        { grep -Ev ' PASSED | SKIPPED |^tests/(kernels|torch)/.* $' || true; } || failed=1
fi

# for the benchmark only, so that no dependency of a peer shadows one of the tests
[ -n "${PEERS:-}" ] && export PYTHONPATH=.:$unpacked
left=$((${SECONDS_IN_ALL:-570} - SECONDS))
timeout -k 5 $((left + 10)) "$python" benchmarks/gpu.py --out "$out" \
    --minutes "$(awk "BEGIN { print ($left - 10) / 60 }")" "$@" 2>&1 | tee "$out/benchmark.log" || failed=1
cat "$(ls -t "$out"/*.md | head -1)"
echo "$SECONDS seconds in all; failed: $failed"
exit $failed
