"""plumb serve under load, on plain sockets: a thousand streams at a time, queues that are full, clients that leave or send
rubbish. Every answer is compared with the answer to the same request asked alone."""

import asyncio
import json
import os
import pathlib
import random
import resource
import signal
import socket
import struct
import subprocess
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

PLUMB = os.environ["PLUMB"]
ROOT = pathlib.Path(__file__).parent.parent.parent
STREAMS = 1000
ATTACKS = 10_000
TOKENS = 8

# Each stream is an open file on both sides.
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)


class Server:
    """The program with the embedded model on a port that the system picks."""

    def __init__(self, folder, *arguments):
        command = [PLUMB, "serve", "--model", ROOT / "assets/tiny", "--port", 0, "--port-file", folder / "port",
                   "--numerics", "fp32", "--served-model-name", "tiny", *arguments]
        self.process = subprocess.Popen([str(c) for c in command], stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:  # ends when the program does
            if line.startswith("serving"):
                break
        self.port = int((folder / "port").read_text())

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        rest = self.process.stderr.read()
        return self.process.wait(timeout=30), rest

    def resident(self, key="VmRSS"):
        """Bytes of memory in use; VmHWM: the most there ever were."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split(key + ":")[1].split()[0]) * 1024

    async def get(self, path):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        status, headers, body = await read_reply(reader)
        writer.close()
        assert status == 200
        return body

    async def settled(self):
        """What /health says once nothing runs or waits."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            health = json.loads(await self.get("/health"))
            if health["running"] + health["waiting"] == 0:
                return health
        raise AssertionError(f"the engine does not become idle: {health}")


@pytest.fixture
def serve(tmp_path):
    servers = []

    def start(*arguments):
        servers.append(Server(tmp_path, *arguments))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()


# ---- A client --------------------------------------------------------------------------------------------------------


async def read_head(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status, *lines = head.strip().split("\r\n")
    return int(status.split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}


async def read_chunks(reader):
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)


async def read_reply(reader):
    status, headers = await read_head(reader)
    if "transfer-encoding" in headers:
        return status, headers, b"".join([chunk async for chunk in read_chunks(reader)]).decode()
    return status, headers, (await reader.readexactly(int(headers["content-length"]))).decode()


def completion(number, stream, tokens=TOKENS):
    """Requests with other prompts, seeds and lengths."""
    r = random.Random(number)
    body = {"model": "tiny", "prompt": [r.randrange(3, 1200) for _ in range(r.randrange(1, 40))], "seed": number,
            "temperature": 1, "max_tokens": tokens, "ignore_eos": True, "stream": stream, "return_token_ids": True}
    return post("/v1/completions", json.dumps(body))


def post(path, body):
    return (f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}").encode()


def events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def stream_tokens(server, number, all_connected):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await all_connected.wait()
    writer.write(completion(number, stream=True))
    status, headers, body = await read_reply(reader)
    writer.close()
    assert status == 200, body
    return [t for e in events(body) for c in e["choices"] for t in c["token_ids"] or []]


async def tokens_alone(server, numbers):
    """One after another over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    answers = []
    for number in numbers:
        writer.write(completion(number, stream=False))
        status, headers, body = await read_reply(reader)
        assert status == 200, body
        answers.append(json.loads(body)["choices"][0]["token_ids"])
    writer.close()
    return answers


# ---- Tests -----------------------------------------------------------------------------------------------------------


def test_a_thousand_streams_then_429(serve):
    server = serve("--max-running", 64, "--max-queue", STREAMS - 64)

    async def run():
        await tokens_alone(server, [0])
        before = server.resident()
        all_connected = asyncio.Barrier(STREAMS)
        streamed = await asyncio.gather(*(stream_tokens(server, i, all_connected) for i in range(STREAMS)))
        assert all(len(tokens) == TOKENS for tokens in streamed)
        # 1,000 connections with their buffers, prompts and coroutines: 64 KB each would be 64 MB.
        assert server.resident("VmHWM") - before < 128e6
        assert streamed == await tokens_alone(server, range(STREAMS))

        # As many as the server takes, and they take long: whoever comes now is told to come again.
        busy = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(STREAMS)]
        for i, (_, writer) in enumerate(busy):
            writer.write(completion(i, stream=True, tokens=2000))
        while True:
            health = json.loads(await server.get("/health"))
            if health["running"] + health["waiting"] == STREAMS:
                break
        for i in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(completion(i, stream=i % 2 == 0))
            status, headers, body = await read_reply(reader)
            assert status == 429 and int(headers["retry-after"]) >= 1
            assert json.loads(body)["error"]["type"] == "rate_limit_error"
            writer.close()
        for _, writer in busy:
            writer.close()
        assert (await server.settled())["pages"]["held"] == 0
        assert await tokens_alone(server, range(3)) == streamed[:3]

    asyncio.run(run())
    code, rest = server.stop()
    assert code == 0 and "stopped" in rest


async def attack(server, r):
    """One client that behaves badly, or not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    valid = completion(r.randrange(50), stream=r.random() < 0.7, tokens=r.choice([1, 8, 500]))
    broken = bytearray(valid)
    for _ in range(r.randrange(1, 4)):
        broken[r.randrange(len(broken))] = r.randrange(256)
    kind = r.randrange(9)
    sent = [b"", valid[: r.randrange(len(valid))], bytes(broken), r.randbytes(r.randrange(200)), valid, valid,
            post("/v1/completions", r.choice(["{", "[]", "null", '{"prompt": 3}', '{"prompt": [1], "n": 1e9}', "[" * 5000])),
            f"GET {'/x' * r.randrange(20_000)} HTTP/1.1\r\n\r\n".encode(), valid + bytes(broken)][kind]
    try:
        writer.write(sent)
        await writer.drain()
        if kind >= 4 and r.random() < 0.5:
            await reader.read(r.choice([1, 200, 5000]))
        if r.random() < 0.5:  # the connection is reset instead of closed
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        await writer.wait_closed()
    except ConnectionError:  # the server may well have hung up
        pass


def test_after_ten_thousand_bad_clients_all_pages_are_free(serve):
    server = serve("--max-running", 16, "--max-queue", 200)

    async def run():
        expected = await tokens_alone(server, range(5))
        before = server.resident()
        numbers = iter(range(ATTACKS))

        async def attacker():
            for number in numbers:
                await attack(server, random.Random(number))

        await asyncio.gather(*(attacker() for _ in range(50)))
        assert (await server.settled())["pages"]["held"] == 0
        assert await tokens_alone(server, range(5)) == expected
        assert server.resident("VmHWM") - before < 128e6

        metrics = {s.name: s.value for family in text_string_to_metric_families(await server.get("/metrics"))
                   for s in family.samples if "pool" not in s.labels}
        assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0
        assert metrics["vllm:kv_cache_usage_perc"] == 0
        assert metrics["plumb:connections"] <= 2  # the one that asks, and one that is being closed

    asyncio.run(run())
    code, _ = server.stop()
    assert code == 0


def test_metrics_are_those_that_dashboards_of_vllm_read(serve):
    server = serve()

    async def run():
        await tokens_alone(server, range(4))
        return await server.get("/metrics")

    families = {f.name: f for f in text_string_to_metric_families(asyncio.run(run()))}
    for name, kind in {"num_requests_running": "gauge", "num_requests_waiting": "gauge", "kv_cache_usage_perc": "gauge",
                       "prompt_tokens": "counter", "generation_tokens": "counter", "request_success": "counter",
                       "prefix_cache_queries": "counter", "prefix_cache_hits": "counter",
                       "time_to_first_token_seconds": "histogram", "inter_token_latency_seconds": "histogram",
                       "e2e_request_latency_seconds": "histogram"}.items():
        assert families["vllm:" + name].type == kind, name
    for name, kind in {"decode_graphs": "gauge", "decode_graph_bytes": "gauge", "decode_graph_replays": "counter"}.items():
        assert families["plumb:" + name].type == kind, name
    values = {s.name: s.value for f in families.values() for s in f.samples}
    assert values["vllm:generation_tokens_total"] == 4 * TOKENS
    assert values["vllm:e2e_request_latency_seconds_count"] == 4
    reasons = {s.labels["finished_reason"]: s.value for s in families["vllm:request_success"].samples}
    assert reasons == {"stop": 0, "length": 4, "abort": 0, "error": 0}
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        buckets = [s.value for s in families["vllm:" + name].samples if s.name.endswith("_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == 4
