"""Generate over gRPC with the bare stub: what any language does with proto/prefixmesh/v1/inference.proto.

Usage: python examples/raw_stub.py HOST:PORT
"""

import sys

import grpc

from prefixmesh.proto.v1 import inference_pb2 as pb
from prefixmesh.proto.v1.inference_pb2_grpc import InferenceStub

with grpc.insecure_channel(sys.argv[1]) as channel:  # host:port of a router or a worker
    prompt = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="What is the capital of France?")])
    request = pb.GenerateRequest(chat=prompt, sampling=pb.Sampling(temperature=0, max_tokens=32))
    for response in InferenceStub(channel).Generate(request, metadata=[("x-prefixmesh-tenant", "acme")]):
        print(response.delta.text, end="", flush=True)  # empty for Started and Finished
    print(f"\n{response.finished.usage.cached_tokens.device} prompt tokens were cached")
