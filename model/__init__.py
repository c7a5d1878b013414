"""The encoder in PyTorch: from a published checkpoint to an artifact folder that the service runs.

Offline side of the project. It may import torch, and it never imports `service`.
"""
