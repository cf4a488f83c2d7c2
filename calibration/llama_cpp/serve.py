#!/usr/bin/env python3
"""Serve a GGUF model with llama.cpp's own HTTP server, from the binary wheel of xllamacpp.

    python calibration/llama_cpp/serve.py --model mid.gguf --port 8080

Prints one line, `ready URL`, and serves until SIGTERM or SIGINT. The defaults are those of the cluster preset
`llama_cpp`: 4 slots with a KV cache of their own each, and no prompt cache in host memory.
"""

import argparse
import signal
import sys
import threading


def main() -> None:
    """Parse the arguments, start the server and wait for a signal."""
    import xllamacpp

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", default="random-llama", help="the model's name for clients")
    parser.add_argument("--port", type=int, default=8080, help="on 127.0.0.1")
    parser.add_argument("--slots", type=int, default=4, help="requests at a time (-np)")
    parser.add_argument("--context", type=int, default=32768, help="tokens of all slots together (-c)")
    parser.add_argument("--batch", type=int, default=2048, help="tokens of an iteration (-b)")
    parser.add_argument("--ubatch", type=int, default=512, help="tokens of a forward pass (-ub)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()

    parameters = xllamacpp.CommonParams()  # pyright: ignore[reportAttributeAccessIssue]
    parameters.model.path = arguments.model
    parameters.model_alias = {arguments.name}
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = arguments.port
    parameters.n_parallel = arguments.slots
    parameters.n_ctx = arguments.context
    parameters.n_batch = arguments.batch
    parameters.n_ubatch = arguments.ubatch
    parameters.cpuparams.n_threads = arguments.threads
    parameters.cpuparams_batch.n_threads = arguments.threads
    parameters.kv_unified = False
    parameters.cache_ram_mib = 0
    parameters.endpoint_metrics = True
    parameters.endpoint_slots = True
    parameters.use_jinja = True
    parameters.n_threads_http = 2 * arguments.slots + 4
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        server = xllamacpp.Server(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError:
        sys.exit(f"error: no server; is {arguments.model} a GGUF model, and port {arguments.port} free?")
    print("ready", server.listening_address, flush=True)
    stop.wait()
    del server


if __name__ == "__main__":
    main()
