# What every job does: tune, measure, draw. A job script sources this file after it has set
#   NAME    the job's name; results are in the folder results/NAME-NODESxLANES, as in results/generic-2x4
#   NODES   the number of nodes
#   RANKS   the number of ranks that LAUNCH starts, as many on each node
#   LAUNCH  how to start one MPI step on all nodes of the job (an array: command and options)
# and a user may set in the environment
#   BUDGET  time for tuning (10m)
#   MEMORY  where the buffers are: host, or cuda (which needs CuPy; see docs/gpu.md)
#   RESULTS another folder for the results
# Each step's result is either complete or not there: a job that ran out of time, submitted
# again, goes on where it ended. Remove the folder to start anew.

BUDGET=${BUDGET:-10m}
MEMORY=${MEMORY:-host}
[[ $MEMORY == host ]] || NAME+=-$MEMORY
RESULTS=${RESULTS:-$PWD/results/$NAME-${NODES}x$((RANKS / NODES))}

fail() {
    echo "$NAME: $*" >&2
    exit 1
}

[[ $MEMORY == host || $MEMORY == cuda ]] || fail "MEMORY=$MEMORY: expected host or cuda"
command -v hiercoll >/dev/null || fail "hiercoll is not on PATH: activate its environment, then submit again"
mkdir -p "$RESULTS"
echo "$NAME: $RANKS ranks, started with: ${LAUNCH[*]}"
echo "$NAME: results in $RESULTS"

# A launcher that does not speak the MPI library's language starts RANKS jobs of one rank
# each, without an error. So ask.
"${LAUNCH[@]}" python -c '
import sys
from mpi4py import MPI
want, size = int(sys.argv[1]), MPI.COMM_WORLD.size
if size != want:
    sys.exit(f"MPI_COMM_WORLD has {size} ranks, not {want}: try another --mpi (srun --mpi=list)")
' "$RANKS"

if [[ ! -e $RESULTS/table.json ]]; then
    "${LAUNCH[@]}" hiercoll tune --budget "$BUDGET" --memory "$MEMORY" --output "$RESULTS/table.json"
fi
hiercoll table show "$RESULTS/table.json" > "$RESULTS/table.txt"

if [[ ! -e $RESULTS/bench.jsonl ]]; then
    rm -f "$RESULTS/bench.part.jsonl"  # bench appends
    "${LAUNCH[@]}" hiercoll bench all --memory "$MEMORY" --table "$RESULTS/table.json" --algorithm auto \
        --json "$RESULTS/bench.part.jsonl"
    mv "$RESULTS/bench.part.jsonl" "$RESULTS/bench.jsonl"
fi
hiercoll plot "$RESULTS/bench.jsonl" --output "$RESULTS/plots"
echo "$NAME: done"
