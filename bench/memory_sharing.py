#!/usr/bin/env python3
"""Share of blocks that sharing saves, for parallel samples and beams, on the real model.

Starts a service without prefix reuse, sends requests with the lengths of a CSV, and reads the control
plane's own counts of each iteration: logical blocks are entries of tables, physical ones are held.
Saved is 1 - 1 / mean(logical / physical), as in the PagedAttention paper's figure 15.

    python bench/memory_sharing.py --lengths ../shared/traces/alpaca_lengths.csv --json sharing.json
"""

import argparse
import http.client
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from loadgen.lengths import Lengths, read_pairs, sample_pairs
from measure.figures import table
from measure.machine import describe, write_json
from measure.processes import running, stop_on_sigterm
from measure.services import Ports, serve_command

from octavo.v1 import generation_pb2 as pb
from octavo.v1 import generation_pb2_grpc as pb_grpc


def main() -> int:
    options = _parser().parse_args()
    stop_on_sigterm()
    pairs = sample_pairs(
        read_pairs(options.lengths, options.max_total), options.requests, random.Random(options.seed)
    )
    ports = Ports.free()
    arguments = ["--no-prefix-caching", f"--block-size={options.block_size}", "--log-level=warning"]
    figures = []
    with running("octavo serve", serve_command(arguments, ports)) as service:
        service.wait_for(ports.http, "/ready", timeout=300)
        for kind, width in [(k, w) for k in ("samples", "beams") for w in options.widths]:
            figures.append(_measure(ports, pairs, kind, width, options))
            print(f"{kind} {width}: {figures[-1]['saved']:.1%} saved", file=sys.stderr, flush=True)
    rows = [[f["kind"], str(f["width"]), f"{f['saved']:.1%}", str(f["iterations"])] for f in figures]
    print(table(["kind", "width", "blocks saved", "iterations"], rows))
    if options.json:
        write_json(options.json, describe({"figures": figures}, vars(options)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lengths", required=True, help="CSV with prompt_tokens,output_tokens")
    parser.add_argument("--max-total", type=int, default=512, help="tokens of a request at most")
    parser.add_argument("--requests", type=int, default=24, help="for each kind and width")
    parser.add_argument("--clients", type=int, default=8, help="requests at once")
    parser.add_argument(
        "--widths", type=lambda text: [int(w) for w in text.split(",")], default=[2, 4, 6]
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    return parser


def _measure(
    ports: Ports, pairs: list[Lengths], kind: str, width: int, options: argparse.Namespace
) -> dict[str, Any]:
    before = _sharing(ports.controlplane_probe)
    rng = random.Random(options.seed)
    requests = [_request(rng, pair, kind, width, options.seed) for pair in pairs]
    with (
        grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel,  # type: ignore[no-untyped-call]
        ThreadPoolExecutor(options.clients) as pool,
    ):
        stub = pb_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        list(pool.map(lambda request: stub.GenerateUnary(request, timeout=600), requests))
    after = _sharing(ports.controlplane_probe)
    ratio, iterations = after[0] - before[0], after[1] - before[1]
    return {
        "kind": kind,
        "width": width,
        "saved": 1 - iterations / ratio,
        "iterations": int(iterations),
    }


def _request(rng: random.Random, pair: Lengths, kind: str, width: int, seed: int) -> pb.GenerateRequest:
    prompt = [rng.randrange(20, 49_000) for _ in range(pair.prompt)]
    sampling = pb.SamplingParams(n=width, max_tokens=pair.output, ignore_eos=True)
    if kind == "beams":
        sampling.use_beam_search = True
    else:
        sampling.seed = seed
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)


def _sharing(port: int) -> tuple[float, float]:
    """Sum of logical / physical blocks over iterations, and the iterations."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    total = re.search(r"^octavo_sharing_ratio_sum (\S+)$", text, re.M)
    count = re.search(r"^octavo_sharing_ratio_count (\S+)$", text, re.M)
    if total is None or count is None:
        raise SystemExit("the control plane does not export octavo_sharing_ratio")
    return float(total[1]), float(count[1])


if __name__ == "__main__":
    sys.exit(main())
