#!/bin/sh
# Make the shipped model again: ./run.sh STATE. Run it again to go on after an interruption.
# SCALE=0.005 ./run.sh STATE takes that share of all steps: a model that knows nothing, by the same road in minutes.
set -eu
state=$1
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python}
export OMP_WAIT_POLICY=PASSIVE
mkdir -p "$state"
cd "$here"
for stage in stages/*.json; do  # a stage that is done ends at once
    "$python" train.py --state "$state" --recipe "$stage" --scale "${SCALE:-1}" --compile
done
model=$root/jaxmm/assets/tiny_vlm
"$python" check.py
"$python" export.py --state "$state" --out "$model"
"$python" evaluate.py --model "$model" --count 200 --json "$state/results.json" --generate 5
"$python" assets.py --model "$model" --samples "$root/jaxmm/assets/samples" \
    --content "$root/tests/data/content" --results "$state/results.json"
