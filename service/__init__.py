"""The server and its client: an artifact folder in, embeddings and attention out, over gRPC.

Neither torch nor transformers is imported anywhere below; `model` is reached by `cli export` alone.
"""
