"""The model: weights, the Llama forward pass, the KV pool, attention. The only room that knows torch.

It computes what a ``BatchPlan`` says and knows no request, no cache and no scheduler.
"""

import os

# Torch's threads wait for each other some hundred times a step. By default they wait spinning, so when anything else uses a
# core of theirs (another worker, a router, the client), each wait lasts until the operating system takes the core away:
# measured with 2 threads on 2 busy cores, a decode step of 965 ms instead of 95. The OpenMP library reads this once, when
# torch is first imported, which in a worker happens after this line. A value from outside wins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
