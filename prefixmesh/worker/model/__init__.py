"""The model: weights, the Llama forward pass, the KV pool, attention. The only room that knows torch.

It computes what a ``BatchPlan`` says and knows no request, no cache and no scheduler.
"""
