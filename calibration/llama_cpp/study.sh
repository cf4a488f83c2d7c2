#!/usr/bin/env bash
# The study of README.md: serve a model, measure it, fit, play agent programs on it, predict them. About 40 minutes on
# an otherwise idle machine. Usage, from anywhere: calibration/llama_cpp/study.sh [FOLDER]
set -euo pipefail
cd "$(dirname "$0")/../.."
here=calibration/llama_cpp
folder=${1:-outputs/llama_cpp}
port=${PORT:-8080}
python=${PYTHON:-python}
server=(url="http://127.0.0.1:$port" model=random-llama endpoint=completions prompts=ids)
cluster=(cluster=llama_cpp cluster.kv_blocks=16384)
mkdir -p "$folder"

$python $here/make_model.py --size mid --out "$folder/mid.gguf"
$python $here/serve.py --model "$folder/mid.gguf" --port "$port" --context 16384 > "$folder/server.log" 2>&1 &
trap 'kill $!' EXIT
until grep -q ready "$folder/server.log"; do sleep 0.2; done

grid() {
    $python -m agentjax.bench "${server[@]}" out="$1" \
        'prompt_tokens=[64,256,768,1536]' 'output_tokens=[48]' 'concurrency=[1,2,3,4]' 'cached_share=[0,0.75,0.97]'
}
grid "$folder/bench-1.jsonl"
for repeat in 1 2 3 4 5; do
    $python -m agentjax.bench mode=programs workload=small_agents "${server[@]}" out="$folder/busy-$repeat.jsonl"
done
for repeat in 1 2 3; do
    $python -m agentjax.bench mode=programs workload=small_agents workload.seed=1 workload.rate=0.06 "${server[@]}" \
        out="$folder/calm-$repeat.jsonl"
done
grid "$folder/bench-2.jsonl"  # again: a shared machine is not the same for an hour

$python -m agentjax.calibrate data="[$folder/bench-1.jsonl,$folder/bench-2.jsonl]" out="$folder/mid.json" figure="$folder/fit.png" \
    max_num_batched_tokens=2048 'about.gpu="AMD EPYC (Zen 5), one core"' 'about.model="random-llama mid, 82 M, f16"' \
    'about.engine="llama.cpp (xllamacpp 2026.10.11549), 4 slots"'
for load in busy calm; do
    files=$(printf '%s,' "$folder/$load"-*.jsonl)
    $python -m agentjax.validate data="[${files%,}]" "${cluster[@]}" performance="$folder/mid.json" \
        figure="$folder/$load.png"
done
