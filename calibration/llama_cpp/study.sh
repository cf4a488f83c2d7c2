#!/usr/bin/env bash
# The study of README.md: serve a model, measure, fit, play agent programs, predict them. About 20 minutes on an
# otherwise idle machine. Usage, from the root of the checkout: calibration/llama_cpp/study.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
here=calibration/llama_cpp
folder=${1:-results/llama_cpp}
port=${PORT:-8080}
python=${PYTHON:-python}
server=(url="http://127.0.0.1:$port" model=random-llama endpoint=completions prompts=ids)
mkdir -p "$folder"

$python $here/make_model.py --size mid --out "$folder/mid.gguf"
$python $here/serve.py --model "$folder/mid.gguf" --port "$port" --context 16384 > "$folder/server.log" 2>&1 &
trap 'kill $!' EXIT
until grep -q ready "$folder/server.log"; do sleep 0.2; done

$python -m agentjax.bench "${server[@]}" out="$folder/bench.jsonl" \
    'prompt_tokens=[64,256,768,1536]' 'output_tokens=[48]' 'concurrency=[1,2,3,4]' 'cached_share=[0,0.75]'
$python -m agentjax.calibrate data="$folder/bench.jsonl" out="$folder/mid.json" figure="$folder/fit.png"
for repeat in 1 2 3 4 5; do
    $python -m agentjax.bench mode=programs workload=small_agents "${server[@]}" out="$folder/programs-$repeat.jsonl"
done
$python -m agentjax.validate data="[$(echo "$folder"/programs-*.jsonl | tr ' ' ,)]" \
    cluster=llama_cpp cluster.kv_blocks=16384 performance="$folder/mid.json" figure="$folder/programs.png"
