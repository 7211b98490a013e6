#!/usr/bin/env bash
# Runs the first half hour on a GPU, in four commands of at most ten minutes:
#
#     bash scripts/gpu/first_half_hour.sh STEP [OUT]
#
#   1  correctness: the tests marked cuda; one private step of WRN16-4 by microbatch and precision, with profiles
#   2  speed: the speed table, the most important rows first
#   3  the paper's CIFAR-10 cell: adaptive per layer, epsilon 3, seed 0, until the time limit
#   4  resumes 3 from its checkpoint; repeat it, here or with OUT on another machine, until it is done
#
# Rows, logs and the checkpoint go to OUT (default: $OUT, else results/first-half-hour). A repeated step continues from
# there. Parts of `make gpu-kit` beside the code or in results/gpu-kit are unpacked and used, except for packages that the
# machine's Python already has. Settings: LIMIT (seconds of a step, 570), DEVICE (cuda or cpu), PRECISION (of the cell:
# float32), SCALE (paper), TINY (true: smallest sizes), PYTHON, GROUPWISE_DATA.
#
# Exit codes: 0 the step is done; 4 the time limit was reached: repeat the command; 2 a user error; 1 a failure.
set -u -o pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
step=${1:-}
out=${2:-${OUT:-$root/results/first-half-hour}}
began=$SECONDS
limit=${LIMIT:-570} device=${DEVICE:-cuda} precision=${PRECISION:-float32} scale=${SCALE:-paper} tiny=${TINY:-false}
python=${PYTHON:-}

fail() { echo "error: $1" >&2; exit 2; }
left() { local rest=$((limit - SECONDS + began)); echo $((rest > 5 ? rest : 5)); }

case $step in 1 | 2 | 3 | 4) ;; *) fail "step '$step' was given: give 1, 2, 3 or 4." ;; esac
if [ -z "$python" ]; then
    if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; else python=$(command -v python3 || command -v python); fi
fi
[ -n "$python" ] || fail "there is no Python here: name one, PYTHON=/path/to/python."
mkdir -p "$out" || fail "$out cannot be created: give another folder."
out=$(cd "$out" && pwd)
log=$out/step-$step.log
cd "$root" || exit 1

# The kit: its parts are beside the code, or in results/gpu-kit. Each is unpacked once.
kit=
for folder in "$root/.." "$root/results/gpu-kit"; do
    for part in "$folder"/{wheels,data-[0-9]*}.tar; do
        [ -f "$part" ] || continue
        kit=$(cd "$folder" && pwd)
        if [ ! "$part.unpacked" -nt "$part" ]; then
            tar -xf "$part" -C "$kit" || fail "$part cannot be unpacked: copy it again."
            touch "$part.unpacked"
        fi
    done
    [ -d "$folder/wheels" ] && [ -z "$kit" ] && kit=$(cd "$folder" && pwd)
done

export PYTHONPATH=$root/src:$root${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8}
export KINETO_LOG_LEVEL=${KINETO_LOG_LEVEL:-9}
if [ -n "$kit" ]; then
    "$python" "$root/scripts/gpu/install.py" "$kit/wheels" "$kit/packages" || exit 2
    export PYTHONPATH=$PYTHONPATH:$kit/packages
    [ -d "$kit/data" ] && export GROUPWISE_DATA=${GROUPWISE_DATA:-$kit/data}
fi
"$python" "$root/scripts/gpu/install.py" check || exit 2

say() { echo "$@" | tee -a "$log"; }
timed() { # seconds command…: interrupted after so many seconds, killed half a minute later
    local seconds=$1
    shift
    timeout --signal=INT --kill-after=30 "$seconds" "$@" 2>&1 | tee -a "$log"
}

say "step $step, $(date -u +%Y-%m-%dT%H:%MZ), device $device, limit $limit s, into $out"
code=0
case $step in
1)
    export GROUPWISE_TEST_DEVICE=$device
    tests=0
    if [ -f "$out/cuda-tests-$device.done" ]; then # run to the end, passed or failed: not repeated
        tests=$(cat "$out/cuda-tests-$device.done")
    else
        timed $(($(left) * 2 / 3)) "$python" -m pytest -m cuda tests/device -q -p no:cacheprovider -rfs --junitxml="$out/cuda-tests.xml" ${TESTS:-} ||
            tests=$?
        case $tests in
        0 | 1) echo "$tests" >"$out/cuda-tests-$device.done" ;;
        124 | 130 | 137) ;;
        *) tests=1 ;; # not those of the benchmarks, where 3 and 4 ask for another call
        esac
    fi
    code=4 # the time limit, where no time is left to begin
    [ "$(left)" -gt 30 ] && code=3
    while [ $code = 3 ] && [ "$(left)" -gt 30 ]; do
        code=0
        timed "$(left)" "$python" -m benchmarks.device_steps out="$out" device="$device" limit=$(($(left) - 30)) tiny="$tiny" ${STEPS:-} || code=$?
    done
    [ $code = 0 ] && code=$tests
    ;;
2)
    code=4
    [ "$(left)" -gt 30 ] && code=3
    while [ $code = 3 ] && [ "$(left)" -gt 30 ]; do # 3: a kernel broke the GPU for that process; another continues
        code=0
        timed "$(left)" "$python" -m benchmarks.device_table out="$out" device="$device" limit=$(($(left) - 30)) tiny="$tiny" ${TABLE:-} || code=$?
    done
    ;;
3 | 4)
    [ "$step" = 4 ] && [ -z "$(ls "$out"/runs/*/checkpoint*.pt "$out"/runs/*/DONE 2>/dev/null)" ] &&
        fail "$out has no run to resume: give step 3 first, or the folder that it wrote to."
    [ "$device" = cuda ] && wanted=auto || wanted=$device # as in a cell of a sweep, so that it is the same run
    timed "$(left)" "$python" run.py task=cifar clip=adaptive_layer privacy.epsilon=3 seed=0 scale="$scale" \
        train.precision="$precision" train.device="$wanted" train.checkpoint_every=20 paths.results="$out" ${CELL:-} || code=$?
    ;;
esac
case $code in
124 | 130 | 137) say "time limit reached (or killed): repeat the command to continue"; code=4 ;;
3) say "a kernel broke the GPU: repeat the command to continue"; code=4 ;;
4) say "not finished: repeat the command to continue" ;;
0) say "step $step is done in $((SECONDS - began)) s" ;;
*) say "step $step ended with exit code $code after $((SECONDS - began)) s; see $log" ;;
esac
exit $code
